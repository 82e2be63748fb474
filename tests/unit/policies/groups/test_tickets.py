"""Tickets: an answer must name a secret that only its group's prompt contains."""

from __future__ import annotations

from asyncrl.messages.topics import group_id_of
from asyncrl.policies.groups.tickets import Tickets


def test_a_key_answers_its_group_with_that_groups_ticket_alone() -> None:
    tickets = Tickets(b"secret")
    assert tickets.group_answered(tickets.key(7, worker="w0")) == 7
    assert len(tickets.ticket(7)) == 32 and tickets.ticket(7) == Tickets(b"secret").ticket(7)
    for key in (
        "7",
        f"7-{tickets.ticket(8)}",
        f"8-{tickets.ticket(7)}",
        f"7-{Tickets(b'other').ticket(7)}",
        f"07-{tickets.ticket(7)}",
        "x",
    ):
        assert tickets.group_answered(f"w0/{key}") is None, key


def test_a_run_without_a_secret_has_no_tickets() -> None:
    tickets = Tickets()
    assert (tickets.ticket(7), tickets.key(7, worker="w0"), tickets.group_answered("w0/7")) == ("", "w0/7", 7)
    assert tickets.group_answered(f"w0/7-{'0' * 32}") is None


def test_whoever_looks_on_knows_the_group_of_an_answer_without_its_ticket() -> None:
    assert group_id_of(Tickets(b"secret").key(12, worker="w0")) == 12
    assert [group_id_of(key) for key in ("a/b/12", "12-", "12-ab", f"12-{'G' * 32}", f"-{'0' * 32}")] == [None] * 5
