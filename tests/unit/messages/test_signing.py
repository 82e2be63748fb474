"""Signatures: a signed message cannot be changed, moved or replayed, and only the key's owner can sign it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from asyncrl.messages.signing import UNSIGNED, Signatures, SigningKey
from asyncrl.messages.topics import ACTORS, EVENTS, PROGRESS, PROMPTS, QUARANTINE, TRAJECTORIES, TRANSFERS, WEIGHTS

LEARNER = SigningKey(b"l" * 32)
OTHER = SigningKey(b"o" * 32)
SIGNED_BY_AN_OLDER_VERSION = bytes.fromhex(
    "c1016d44f939f829d43598bcdedda90de01db69faa50caa33e8c6c328a4b900d4dac00000000000000050000000000000001"
    "a306002b7143b849c1992891ba1738bbc6d6a898a06462b1150aa65cb6abd1958d133fc5df3e1f3937e4ad47c3f29bd7e2d7"
    "038ef3ed626c0a7f5e1d9487950e73616964"
)
"""The result of ``learner().seal(PROGRESS, "", b"said")`` when digests were SHA-256."""
WRONG_HERE = "has a signature that is wrong here"


def learner(*, run: str = "r", life: int = 5, key: SigningKey = LEARNER) -> Signatures:
    return Signatures(run=run, own=key, life=life, learner=key.public)


def reader(*, run: str = "r", **more: Any) -> Signatures:
    return Signatures(run=run, **({"learner": LEARNER.public} | more))


def test_what_the_learner_signed_is_read_as_it_was() -> None:
    opened = reader().open(PROGRESS, "", learner().seal(PROGRESS, "", b"said"))
    assert (bytes(opened.data), opened.problem, opened.signer) == (b"said", "", LEARNER.public)


def test_what_an_older_version_signed_is_read_too_and_no_byte_of_it_can_be_changed() -> None:
    opened = reader().open(PROGRESS, "", SIGNED_BY_AN_OLDER_VERSION)
    assert (bytes(opened.data), opened.problem, opened.signer) == (b"said", "", LEARNER.public)
    for place in range(len(SIGNED_BY_AN_OLDER_VERSION)):
        tampered = bytearray(SIGNED_BY_AN_OLDER_VERSION)
        tampered[place] ^= 3 if place == 1 else 1
        assert reader().open(PROGRESS, "", bytes(tampered)).problem, place


def test_no_byte_of_it_can_be_changed() -> None:
    data = learner().seal(PROGRESS, "", b"said")
    for place in range(len(data)):
        tampered = bytearray(data)
        tampered[place] ^= 1
        assert reader().open(PROGRESS, "", bytes(tampered)).problem, place
    for length in range(len(data)):
        assert reader().open(PROGRESS, "", data[:length]).problem, length


def test_it_holds_for_its_run_its_topic_and_its_key() -> None:
    data = learner().seal(PROMPTS, "7", b"said")
    assert not reader().open(PROMPTS, "7", data).problem
    assert reader().open(PROMPTS, "8", data).problem == WRONG_HERE
    assert reader().open(QUARANTINE, "7", data).problem == WRONG_HERE
    assert reader(run="s").open(PROMPTS, "7", data).problem == WRONG_HERE


def test_run_topic_and_key_do_not_run_into_each_other() -> None:
    renamed = dataclasses.replace(PROGRESS, name="xprogress")
    assert reader(run="r").open(renamed, "", learner(run="rx").seal(PROGRESS, "", b"said")).problem == WRONG_HERE


def test_nobody_else_can_say_it() -> None:
    assert reader().open(WEIGHTS, "", b"\x93said").problem == "is not signed by the run's learner"
    forged = learner(key=OTHER).seal(WEIGHTS, "", b"said")
    assert reader().open(WEIGHTS, "", forged).problem == (
        f"is signed by {OTHER.public[:8]}..., the run's learner is {LEARNER.public[:8]}..."
    )
    as_learner = forged[:2] + bytes.fromhex(LEARNER.public) + forged[34:]
    assert reader().open(WEIGHTS, "", as_learner).problem == WRONG_HERE


def test_an_old_state_is_not_taken_again_and_the_newest_is() -> None:
    here, there = learner(), reader()
    old, new = here.seal(PROGRESS, "", b"old"), here.seal(PROGRESS, "", b"new")
    assert not there.open(PROGRESS, "", old).problem
    assert not there.open(PROGRESS, "", new).problem
    assert there.open(PROGRESS, "", old).problem == "is an old message of the learner, replayed by somebody else"
    assert bytes(there.open(PROGRESS, "", new).data) == b"new"


def test_an_old_state_of_another_key_is_no_concern() -> None:
    here, there = learner(), reader()
    first, second = here.seal(QUARANTINE, "w0", b"a"), here.seal(QUARANTINE, "w1", b"b")
    assert not there.open(QUARANTINE, "w1", second).problem
    assert not there.open(QUARANTINE, "w0", first).problem


def test_a_state_of_an_earlier_life_is_old_whatever_its_sequence() -> None:
    before, after, there = learner(life=5), learner(life=6), reader()
    for _ in range(10):
        old = before.seal(PROGRESS, "", b"finished")
    assert not there.open(PROGRESS, "", old).problem
    assert not there.open(PROGRESS, "", after.seal(PROGRESS, "", b"resumed")).problem
    assert there.open(PROGRESS, "", old).problem


def test_an_answer_on_its_way_while_something_newer_was_heard_is_no_replay() -> None:
    here, there = learner(), reader()
    old, new = here.seal(PROGRESS, "", b"old"), here.seal(PROGRESS, "", b"new")
    seen = there.seen()
    assert not there.open(PROGRESS, "", new).problem
    assert not there.open(PROGRESS, "", old, seen=seen).problem
    assert there.open(PROGRESS, "", old, seen=there.seen()).problem


def test_work_may_be_delivered_in_any_order_and_again() -> None:
    here, there = learner(), reader()
    first, second = here.seal(PROMPTS, "1", b"a"), here.seal(PROMPTS, "2", b"b")
    for key, data in (("2", second), ("1", first), ("2", second)):
        assert not there.open(PROMPTS, key, data).problem


def test_an_answer_holds_for_its_question() -> None:
    data = learner().seal_answer(TRANSFERS, b"question", b"answer")
    assert bytes(reader().open_answer(TRANSFERS, b"question", data).data) == b"answer"
    assert reader().open_answer(TRANSFERS, b"another", data).problem == WRONG_HERE
    assert reader().open_answer(TRANSFERS, b"question", b"answer").problem
    assert reader().open(PROGRESS, "", data).problem


def test_what_is_not_the_learners_is_read_signed_or_not() -> None:
    for data in (b"\x93said", learner(key=OTHER).seal(TRAJECTORIES, "1", b"\x93said")):
        assert bytes(reader().open(TRAJECTORIES, "1", data).data) == b"\x93said"


def test_who_knows_no_learner_reads_everything() -> None:
    for data in (
        b"\x93said",
        learner().seal(PROGRESS, "", b"\x93said"),
        learner(key=OTHER).seal(PROGRESS, "", b"\x93said"),
    ):
        assert bytes(UNSIGNED.open(PROGRESS, "", data).data) == b"\x93said"
    assert UNSIGNED.seal(PROGRESS, "", b"said") == b"said"


def test_who_learns_believes_the_first_learner_it_hears() -> None:
    there = reader(learner="", learns=True)
    tampered = learner(key=OTHER).seal(PROGRESS, "", b"said")[:-1] + b"!"
    assert there.open(PROGRESS, "", tampered).problem and not there.learner
    assert not there.open(PROGRESS, "", learner().seal(PROGRESS, "", b"said")).problem
    assert there.learner == LEARNER.public
    assert there.open(PROGRESS, "", learner(key=OTHER).seal(PROGRESS, "", b"said")).problem
    assert there.open(PROGRESS, "", b"\x93said").problem


def test_a_key_is_kept_as_text_and_not_shown() -> None:
    key = SigningKey.generate()
    assert SigningKey.from_text(key.text()).public == key.public
    assert key.text() not in repr(key)
    for text in ("", "x" * 64, key.text()[1:], key.text().upper() + "\n"):
        with pytest.raises(ValueError, match="64 hexadecimal digits"):
            SigningKey.from_text(text)


# -- names -------------------------------------------------------------------------------------------------------------

WORKER = SigningKey(b"w" * 32)


def bound(name: str) -> str:
    return {"w0": WORKER.public, "learner": LEARNER.public}.get(name, "")


def test_a_name_that_has_a_key_is_its_owners_alone() -> None:
    there = reader(bound=bound)
    honest = learner(key=WORKER).seal(TRAJECTORIES, "1", b"\x93said")
    assert there.impostor(TRAJECTORIES, "1", honest, name="w0") == ""
    for data in (b"\x93said", learner(key=OTHER).seal(TRAJECTORIES, "1", b"\x93said"), honest[:-1] + b"!", honest[:50]):
        assert (
            there.impostor(TRAJECTORIES, "1", data, name="w0")
            == "bears the name 'w0' but was signed by another process"
        )
    assert there.impostor(TRAJECTORIES, "2", honest, name="w0"), "it was said of another group"
    assert there.impostor(ACTORS, "w0", honest, name="learner")


def test_the_learner_may_speak_of_its_workers_and_anybody_under_a_free_name() -> None:
    there = reader(bound=bound)
    assert there.impostor(EVENTS, "joined", learner().seal(EVENTS, "joined", b"\x93said"), name="w0") == ""
    assert there.impostor(EVENTS, "joined", b"\x93said", name="guest") == ""
    assert reader().impostor(EVENTS, "joined", b"\x93said", name="w0") == "", "who knows no names"


def test_a_reader_that_is_behind_another_one_of_its_process_is_not_alarmed() -> None:
    here, there = learner(), reader()
    old, new = here.seal(PROGRESS, "", b"old"), here.seal(PROGRESS, "", b"new")
    first, second = there.seen(), there.seen()
    assert not there.open(PROGRESS, "", new, seen=first).problem
    assert not there.open(PROGRESS, "", old, seen=second).problem
    assert there.open(PROGRESS, "", old, seen=first).problem
    assert not there.open(PROGRESS, "", new, seen=second).problem
    assert there.open(PROGRESS, "", old, seen=second).problem
