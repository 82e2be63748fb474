"""Findings: conditions of actors, faults, and what is said of whole runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from asyncrl.logs import printable_text
from asyncrl.messages import Heartbeat
from asyncrl.messages.roles import LEARNER, WORKER
from asyncrl.policies.health import conditions
from asyncrl.policies.health.conditions import CONDITIONS
from asyncrl.policies.health.diagnosis import diagnose
from asyncrl.policies.health.faults import SILENT_SECONDS, ActorStatus, Observation, Process
from asyncrl.policies.health.waits import UNKNOWN_SECONDS, stall_limit, usual_seconds
from tests.unit.policies.health.test_diagnosis import (
    ALL_ELSE,
    HEALTHY,
    IDLE,
    TABLE,
    Row,
    observed,
    on,
    prompts,
    weights,
)


def showing(numbers: dict[str, float], *, seconds: float = 0.0) -> Observation:
    learner = Heartbeat(actor=LEARNER, role=LEARNER, host="here", pid=1)
    worker = Heartbeat(actor="w0", role=WORKER, host="here", pid=7, numbers=numbers)
    return Observation(
        actors={LEARNER: ActorStatus(beat=learner), "w0": ActorStatus(beat=worker, seconds=seconds)}, listened=20.0
    )


@pytest.mark.parametrize(("number", "condition"), CONDITIONS.items(), ids=[one.fault for one in CONDITIONS.values()])
def test_condition_is_named_at_its_threshold_and_restarts_nobody(number: str, condition: conditions.Condition) -> None:
    assert diagnose(showing({number: condition.threshold * 0.99})) == []
    (found,) = diagnose(showing({number: condition.threshold}))
    assert (found.fault, found.actor, found.pid, found.cure) == (condition.fault, "w0", 7, "")
    assert found.cause.startswith("w0 ")
    assert "{" not in found.cause
    assert "\n" not in found.line and found.line.count(" -> ") == 1 and found.cost


def test_a_full_disk_of_a_worker_is_to_be_made_room_on_and_nothing_else() -> None:
    seen = showing({"weights/failed_reads": 4.0})
    (unreadable,) = diagnose(seen)
    assert "model.path" in unreadable.remedy
    status = seen.actors["w0"]
    full = replace(status, beat=replace(status.beat, problem="/tmp/x: cannot keep weights: No space left on device"))
    (found,) = diagnose(replace(seen, actors=dict(seen.actors) | {"w0": full}))
    assert found.remedy == "make room on that disk of the worker: it tries again by itself"


def test_conditions_of_silent_actors_are_left_out() -> None:
    assert list(conditions.findings(showing({"alarm/mismatch": 1.0}, seconds=SILENT_SECONDS + 1))) == []


def test_nothing_is_a_stall_for_minutes_until_a_usual_duration_is_known() -> None:
    assert usual_seconds([]) == usual_seconds([1, 2]) == 0
    assert usual_seconds([1, 2, 300]) == 2  # one hang that healed does not count
    assert stall_limit(0.5) == 10
    assert stall_limit(5) == 20
    assert stall_limit(0) == UNKNOWN_SECONDS == 300


def test_a_process_that_starts_may_be_silent_while_it_imports() -> None:
    starting = Heartbeat(actor="w0", role=WORKER, phase="starting", host="here", pid=7)
    learner = ActorStatus(beat=Heartbeat(actor=LEARNER, role=LEARNER, host="here", pid=1))

    def faults_of(seconds: float, process: Process) -> list[str]:
        status = ActorStatus(beat=starting, seconds=seconds, process=process)
        return [one.fault for one in diagnose(Observation(actors={LEARNER: learner, "w0": status}, listened=400.0))]

    assert faults_of(40, "running") == faults_of(40, "") == []
    assert faults_of(301, "running") == ["blocked"]
    assert faults_of(7, "stopped") == ["frozen"]
    assert faults_of(7, "gone") == ["gone"]


@pytest.mark.parametrize(
    "text",
    ["全角\u3000空白", "prix\xa0: 12\u202f000 €", "می\u200cخواهم", "👩\u200d👩\u200d👧", "soft\xadhy", "a\tb\nc"],
)
def test_shows_spaces_and_joiners_of_any_script(text: str) -> None:
    assert printable_text(text) == text


@pytest.mark.parametrize("letter", ["\x1b", "\r", "\x7f", "\x9b", "\u2028", "\u2029", "\ud800", "\u202e", "\u2066"])
def test_hides_characters_that_control_a_terminal_or_reorder_text(letter: str) -> None:
    assert printable_text(f"a{letter}b") == "a?b"


def test_starting_learner_counts_for_its_prompt_source_and_weights() -> None:
    """No matter how long workers have waited: the previous learner was killed because of these waits."""
    observation = observed(replace(HEALTHY, waits=IDLE | {"w1": (prompts(90),), "w2": (prompts(90), weights(80))}))
    starting = Heartbeat(actor=LEARNER, role=LEARNER, phase="starting", waits=(on("start", 5, limit=25),), pid=2)
    workers = {name: seen for name, seen in observation.actors.items() if name.startswith("w")}
    del workers["weights"]
    assert diagnose(replace(observation, actors=workers | {LEARNER: ActorStatus(beat=starting)})) == []
    (found,) = diagnose(replace(observation, actors=workers, leaderless=7.0))
    assert found.fault == "no learner"


def test_quarantined_worker_is_named_and_does_not_count_as_a_worker() -> None:
    def quarantined(name: str) -> ActorStatus:
        seen = observed(replace(HEALTHY, waits=IDLE)).actors[name]
        return replace(seen, beat=replace(seen.beat, phase="quarantined", problem="it lies", waits=()))

    healthy = observed(HEALTHY)
    (found,) = diagnose(replace(healthy, actors=dict(healthy.actors) | {"w1": quarantined("w1")}))
    assert (found.fault, found.actor, found.cause) == ("quarantine", "w1", "worker w1 is quarantined: it lies")
    assert "judges a new process from scratch" in found.remedy
    idle = observed(replace(HEALTHY, waits=IDLE))
    both = diagnose(replace(idle, actors=dict(idle.actors) | {name: quarantined(name) for name in ("w1", "w2")}))
    assert [one.fault for one in both] == ["no worker", "quarantine", "quarantine"]


def test_process_is_named_once_for_all_its_actors() -> None:
    found = diagnose(observed(Row(fault="", says="", waits=ALL_ELSE, silent={1: 9, 11: 9}, process={1: "gone"})))
    assert sorted((finding.fault, finding.actor) for finding in found) == [("gone", LEARNER), ("silent", "w1")]


def test_faults_that_hold_up_the_learner_come_first() -> None:
    waits = IDLE | {"w1": (on("reward", 9),), "w2": (on("engine", 9),), "w1.weights": (on("folder", 9),)}
    found = diagnose(observed(replace(HEALTHY, waits=waits)))
    assert [finding.fault for finding in found] == ["engine", "reward", "folder"]
    assert [bool(finding.victims) for finding in found] == [True, True, False]


def test_finished_run_has_no_findings() -> None:
    observation = observed(TABLE["there is no worker at all"])
    assert diagnose(replace(observation, is_finished=True)) == []
    assert diagnose(replace(observation, is_finished=True, bus_silent=9.0)) == []


@pytest.mark.parametrize("name", ["no learner", "no worker"])
def test_own_processes_are_not_missed_while_they_are_up(name: str) -> None:
    """Both processes have worked and still run, so their heartbeats are being removed. That must not end the run."""
    rows = [row for row in TABLE.values() if row.fault == name]
    assert rows
    for row in rows:
        seen = replace(observed(row), own_roles=frozenset({LEARNER, WORKER}))
        assert not [finding for finding in diagnose(seen) if finding.fault == name]


def test_learner_that_has_just_left_is_not_missed_at_once() -> None:
    observation = observed(TABLE["there is no learner"])
    assert diagnose(replace(observation, leaderless=3.0)) == []
    assert [one.fault for one in diagnose(replace(observation, leaderless=7.0))] == ["no learner"]
