"""Processes that work well alone but do not fit together are named by their differences."""

from __future__ import annotations

from dataclasses import replace

import pytest

from asyncrl.messages import Heartbeat
from asyncrl.policies.health.diagnosis import diagnose
from asyncrl.policies.health.faults import EVALUATION_WORKER, LEARNER, SILENT_SECONDS, WORKER, Observation, Seen
from asyncrl.policies.health.fleet import APART_SECONDS, CODE, FUNCTIONS, TOKENIZER


def process(
    name: str,
    *,
    role: str = WORKER,
    code: float = 1.0,
    functions: float = 2.0,
    tokenizer: float = 4.0,
    clock: float | None = 0.0,
) -> Seen:
    """A process on a machine with the same name."""
    numbers = {CODE: code, FUNCTIONS: functions, TOKENIZER: tokenizer}
    return Seen(beat=Heartbeat(actor=name, role=role, host=name, pid=7, numbers=numbers), clock=clock)


def named(*workers: Seen, learner: Seen | None = None) -> list[tuple[str, str]]:
    learner = learner or process(LEARNER, role=LEARNER)
    actors = {seen.beat.actor: seen for seen in (learner, *workers)}
    return [(one.fault, one.text) for one in diagnose(Observation(actors=actors, listened=20.0))]


def test_a_fleet_of_one_kind_is_well() -> None:
    assert named(process("w0"), process("w1", clock=APART_SECONDS), process("old", clock=None)) == []


@pytest.mark.parametrize("role", [WORKER, EVALUATION_WORKER])
def test_a_worker_that_runs_other_code_functions_or_tokenizer_is_named(role: str) -> None:
    assert named(process("w0"), process("w1", role=role, code=3.0)) == [
        ("other code", "worker w1 runs another version of asyncrl than the learner")
    ]
    assert named(process("w0", role=role, functions=3.0), process("w1")) == [
        ("other functions", "worker w0 was started with another reward or rollout function than the learner")
    ]
    assert named(process("w0"), process("w1", role=role, tokenizer=5.0)) == [
        ("other tokenizer", "worker w1 has another tokenizer or other end tokens at its model.path than the learner")
    ]


def test_a_machine_whose_clock_is_far_off_is_named_once() -> None:
    first, second = process("w0", clock=-300.0), process("w1", clock=-300.0)
    second = replace(second, beat=replace(second.beat, host="w0"))
    assert named(first, second) == [("clock apart", "the clock of w0 is 300 s behind that of the learner's machine")]
    assert named(process("w0", clock=90.0))[0][1].startswith("the clock of w0 is 90 s ahead of that of")


def test_a_watcher_whose_own_clock_is_off_accuses_nobody() -> None:
    assert named(process("w0", clock=900.0), learner=process(LEARNER, role=LEARNER, clock=890.0)) == []


def test_nothing_is_said_of_who_is_not_heard_or_says_nothing() -> None:
    silent = replace(process("w0", code=3.0, clock=900.0), seconds=SILENT_SECONDS + 1)
    assert [fault for fault, _ in named(silent)] == ["silent"]
    mute = process("w0")
    mute = replace(mute, beat=replace(mute.beat, numbers={}), clock=None)
    assert named(mute) == []
    assert [fault for fault, _ in named(process("w0", clock=9e9), learner=mute)] == ["no learner"]


def jumped(name: str, shift: float, *, host: str = "left") -> Seen:
    seen = process(name, role=LEARNER if name == LEARNER else WORKER)
    return replace(seen, beat=replace(seen.beat, host=host, clock_shift=shift))


def jumps(*actors: Seen) -> list[tuple[str, tuple[str, str]]]:
    found = diagnose(Observation(actors={seen.beat.actor: seen for seen in actors}, listened=20.0))
    return [(one.text, one.key) for one in found if one.fault == "clock"]


def test_a_jump_that_several_processes_of_a_machine_saw_is_one_finding_that_stays_the_same() -> None:
    learner, worker = jumped(LEARNER, -3600.0), jumped("w0", -3599.9)
    (found,) = jumps(learner, worker)
    assert found[0] == "the clock of left jumped by -3600 s"
    assert jumps(learner) == jumps(worker) == [found]
    assert len(jumps(learner, replace(worker, beat=replace(worker.beat, host="right")))) == 2


@pytest.mark.parametrize("next_shift", [3600.0, -60.0])
def test_the_next_jump_of_a_machine_is_a_finding_of_its_own(next_shift: float) -> None:
    assert len({key for _, key in jumps(jumped("w0", -3600.0), jumped(LEARNER, next_shift))}) == 2
