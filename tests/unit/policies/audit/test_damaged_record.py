"""Missing or unreadable lines of the history are reported, and hide only what they contained."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from asyncrl.policies.audit.accounting import Account, BusFacts, Logged, SavedFacts, account
from asyncrl.policies.audit.entries import BEGUN, DAMAGED, HistoryEntry, damage, present
from asyncrl.policies.groups.ledger import Ledger

LINE = 100
"""Bytes of each line."""


class Run:
    """A run that is killed and resumed and drops one of two groups at every step; its history and newest checkpoint."""

    def __init__(self, seed: int, *, lives: int = 3) -> None:
        chance = random.Random(seed)
        self.entries: list[HistoryEntry] = []
        self.log: list[Logged] = []
        step, done, next_id, kept = 0, list[int](), 0, 0
        self.saved = SavedFacts(
            step=0, position=0, groups=Ledger(), consumed=Ledger(watermark=1), next_group_id=0, outstanding=()
        )
        for life in range(lives):
            self._add(BEGUN, life, step=step, kept=kept, max_staleness=2)
            for _ in range(chance.randrange(3, 8)):
                group_id, next_id = next_id, next_id + 2
                self._log(group_id, group_id + 1)
                self._add("dropped", life, step=step, groups=(group_id,))
                step += 1
                self._add("trained", life, step=step, groups=(group_id + 1,))
                done += [group_id, group_id + 1]
                if chance.random() < 0.4 or life == lives - 1:
                    checkpoint = (step, list(done), next_id, self.size)
            step, done, next_id, kept = checkpoint[0], list(checkpoint[1]), checkpoint[2], checkpoint[3]
        self.saved = SavedFacts(
            step=step,
            position=kept,
            groups=Ledger(0, done),
            consumed=Ledger(1, [group_id + 1 for group_id in done]),
            next_group_id=next_id,
            outstanding=(),
        )

    @property
    def size(self) -> int:
        return LINE * len(self.entries)

    def _add(self, kind: str, life: int, *, step: int, **fields: object) -> None:
        self.entries.append(HistoryEntry(kind=kind, incarnation=life, step=step, position=self.size, **fields))  # type: ignore[arg-type]

    def _log(self, *group_ids: int) -> None:
        known = {record.group_id for record in self.log}
        self.log += [Logged(sequence=i + 1, group_id=i) for i in group_ids if i not in known]

    def account(self, entries: Sequence[HistoryEntry], *, size: int | None = None) -> Account:
        bus = BusFacts(prompts=len(self.log), queued=(), log=self.log, first=1, last=len(self.log))
        return account(entries, saved=self.saved, bus=bus, size=self.size if size is None else size)


def damaged(entry: HistoryEntry, before: HistoryEntry | None) -> HistoryEntry:
    incarnation, step = (before.incarnation, before.step) if before is not None else (0, 0)
    problem = f"line {entry.position // LINE + 1} cannot be read"
    return HistoryEntry(kind=DAMAGED, incarnation=incarnation, step=step, position=entry.position, problem=problem)


def no_fault(made: Account) -> bool:
    return made.lost == made.duplicated == 0 and made.problems == ()


def groups_of(entries: Sequence[HistoryEntry]) -> set[int]:
    return {group_id for entry in entries for group_id in entry.groups}


@pytest.mark.parametrize("seed", range(12))
def test_a_line_that_cannot_be_read_loses_and_doubles_nothing(seed: int) -> None:
    run = Run(seed)
    whole = run.account(run.entries)
    assert whole.is_clean and whole.unrecorded == 0 and whole.damage == ()
    here = present(run.entries)
    for index, entry in enumerate(run.entries):
        bad = damaged(entry, run.entries[index - 1] if index else None)
        made = run.account([*run.entries[:index], bad, *run.entries[index + 1 :]])
        assert no_fault(made), (index, made.problems)
        if entry.kind != BEGUN:
            assert made.unrecorded == (len(entry.groups) if entry in here else 0)
            assert len(made.damage) == (entry in here)
        assert made.prompts == whole.prompts
        parts = (made.trained, made.dropped, made.failed, made.filtered, made.pending, made.lost, made.unrecorded)
        assert sum(parts) == made.prompts


@pytest.mark.parametrize("seed", range(12))
def test_a_history_that_was_cut_or_is_gone_loses_and_doubles_nothing(seed: int) -> None:
    run = Run(seed, lives=2)
    for count in range(len(run.entries)):
        made = run.account(run.entries[:count], size=count * LINE)
        assert no_fault(made), (count, made.problems)
        if count * LINE < run.saved.position:
            done = {group_id for group_id in range(run.saved.next_group_id) if group_id in run.saved.groups}
            assert made.unrecorded == len(done - groups_of(present(run.entries[:count])))
            assert f"the checkpoint of step {run.saved.step} was made with" in made.damage[0]


def test_a_group_that_is_lost_is_lost_however_damaged_the_record_is() -> None:
    """Group 4 is not done, not on the bus and not outstanding, so no line of any history could explain it."""
    run = Run(2, lives=1)
    run.saved = SavedFacts(
        step=run.saved.step,
        position=run.saved.position,
        groups=Ledger(0, [i for i in range(run.saved.next_group_id) if i != 4]),
        consumed=run.saved.consumed,
        next_group_id=run.saved.next_group_id,
        outstanding=(),
    )
    entries = [damaged(entry, None) if 4 in entry.groups else entry for entry in run.entries]
    made = run.account(entries)
    assert (made.lost, made.unrecorded) == (1, 0)


def test_the_steps_of_a_damaged_place_are_named() -> None:
    run = Run(3, lives=1)
    entries = [damaged(entry, None) if 5 <= index <= 8 else entry for index, entry in enumerate(run.entries)]
    sentence = "history.jsonl is damaged ({}): line 6 cannot be read; to line 9 cannot be read"
    assert damage(present(entries)[:9]) == [sentence.format("from step 3 on")]
    assert damage(present(entries)[:9], until=(4, 900)) == [sentence.format("steps 3 to 4")]
    assert damage([*present(entries)[:9], HistoryEntry(kind="trained", incarnation=0, step=5, position=900)]) == [
        sentence.format("steps 3 to 4")
    ]


def test_a_damaged_place_is_never_called_clean_though_no_group_is_missing() -> None:
    """The damaged line began an incarnation. No group is missing, but that line's bound and settings are lost."""
    run = Run(4, lives=1)
    made = run.account([damaged(run.entries[0], None), *run.entries[1:]])
    assert (made.unrecorded, made.has_no_fault, made.is_clean) == (0, True, False)
    assert made.damaged_places == len(made.damage) == 1
    assert run.account(run.entries).damaged_places == 0


@pytest.mark.parametrize("seed", range(5))
def test_a_history_that_is_there_twice_says_so_and_counts_once(seed: int) -> None:
    run = Run(seed)
    copied = [replace(entry, position=entry.position + run.size) for entry in run.entries]
    history = present([*run.entries, *copied])
    assert [entry for entry in history if entry.kind != DAMAGED] == present(run.entries)
    assert "incarnation 0 begins a second time" in damage(history)[0]
