"""Every kind of fault is named with its cause and its victims; a run that is only slow has no finding.

The run of the table has a learner with its prompt source and weight sender, and workers w1 and w2 with their followers.
Each row is what the actors report under one fault. Times are in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from asyncrl.messages import Heartbeat, Wait
from asyncrl.messages.roles import FOLLOWER, LEARNER, PROMPT_SOURCE, SENDER, WORKER
from asyncrl.policies.health.diagnosis import diagnose
from asyncrl.policies.health.faults import SETTINGS, ActorStatus, Observation, other_settings
from asyncrl.policies.health.waits import ROOM_IN_WINDOW, SPACE_IN_LOG, STRAGGLERS

PROCESSES = {LEARNER: 1, "prompts": 1, "weights": 1, "w1": 11, "w1.weights": 11, "w2": 12, "w2.weights": 12}
ROLES = {LEARNER: LEARNER, "prompts": PROMPT_SOURCE, "weights": SENDER, "w1": WORKER, "w2": WORKER}
HOSTS = {1: "trainer", 11: "left", 12: "right"}


def on(part: str, seconds: float, *, usual: float = 0.1, limit: float = 6.0, what: str = "it") -> Wait:
    """A wait for a part of the actor's own process."""
    return Wait(what=what, on=part, seconds=seconds, usual=usual, limit=limit)


def trajectories(seconds: float) -> Wait:
    return Wait(what="trajectories", on=WORKER, seconds=seconds)


def held(seconds: float) -> Wait:
    return Wait(what=f"trajectories {STRAGGLERS}", on=WORKER, seconds=seconds)


def prompts(seconds: float) -> Wait:
    return Wait(what="prompts", on=PROMPT_SOURCE, seconds=seconds)


def room(seconds: float) -> Wait:
    return Wait(what=ROOM_IN_WINDOW, on=LEARNER, seconds=seconds)


def space(seconds: float) -> Wait:
    return Wait(what=SPACE_IN_LOG, on=LEARNER, seconds=seconds)


def weights(seconds: float) -> Wait:
    return Wait(what="weights of version 5", on=LEARNER, seconds=seconds)


TOKEN = on("engine", 0.1, what="the next token of 8 answers")
ENDED = Wait(what="more data", on="data", seconds=40)
ALL_ELSE: dict[str, tuple[Wait, ...]] = {
    LEARNER: (on("step", 0.5),),
    "prompts": (room(0.5),),
    "w1": (TOKEN, prompts(0.5)),
    "w2": (TOKEN, prompts(0.5)),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One fault: the differences from a healthy run, and the text that the finding must contain."""

    fault: str
    says: str
    waits: dict[str, tuple[Wait, ...]] = field(default_factory=dict)
    silent: dict[int, float] = field(default_factory=dict)  # process: seconds
    process: dict[int, str] = field(default_factory=dict)
    without: tuple[int, ...] = ()
    numbers: dict[str, float] = field(default_factory=dict)
    problem: str = ""
    bus: dict[str, Any] = field(default_factory=dict)
    others: tuple[str, ...] = ()


IDLE = {LEARNER: (trajectories(14),), "prompts": (room(14),), "w1": (prompts(13),), "w2": (prompts(12),)}
"""The learner has nothing to train, and working actors have nothing to do."""

TABLE: dict[str, Row] = {
    "an engine hangs": Row(
        fault="engine",
        says="learner waits for trajectories; worker w1 waits for prompts; "
        "worker w2's engine has not answered for 12 s (the next token of 8 answers; usually at most 0.1 s)",
        waits=IDLE | {"w2": (on("engine", 12, what="the next token of 8 answers"), prompts(11))},
    ),
    "an engine hangs while another works": Row(
        fault="engine",
        says="worker w2's engine has not answered for 7 s (it; usually at most 0.1 s)",
        waits={"w2": (on("engine", 7),)},
    ),
    "an engine hangs with what a full batch is held for": Row(
        fault="engine",
        says="learner waits for trajectories that would become too old; worker w1 waits for prompts; "
        "worker w2's engine has not answered for 12 s",
        waits=IDLE | {LEARNER: (held(14),), "w2": (on("engine", 12), prompts(11))},
    ),
    "a reward function hangs": Row(
        fault="reward",
        says="worker w2's reward function has not returned for 9 s",
        waits=IDLE | {"w2": (on("reward", 9), prompts(11))},
    ),
    "a rollout function hangs": Row(
        fault="rollout",
        says="worker w1's rollout function has not returned for 8 s",
        waits=IDLE | {"w1": (on("rollout", 8),)},
    ),
    "a harness hangs": Row(
        fault="harness",
        says="worker w1's harness has neither called the model nor ended for 60 s",
        waits=IDLE | {"w1": (on("harness", 60),)},
    ),
    "a weight load hangs": Row(
        fault="load",
        says="worker w1's engine has not loaded its weights for 30 s",
        waits=IDLE | {"w1": (weights(31), on("load", 30)), "w1.weights": (on("load", 30),)},
    ),
    "a shared folder hangs": Row(
        fault="folder",
        says="worker w1 has been reading a weight folder for 9 s",
        waits={"w1.weights": (on("folder", 9),)},
    ),
    "a worker is frozen by SIGSTOP": Row(
        fault="frozen",
        says="learner waits for trajectories; worker w1 waits for prompts; "
        "worker w2 is stopped (SIGSTOP) and has not been heard of for 8 s (process 12 on right)",
        waits=IDLE | {"w2": (TOKEN,)},
        silent={12: 8},
        process={12: "stopped"},
    ),
    "the learner is frozen by SIGSTOP": Row(
        fault="frozen",
        says="worker w1 waits for prompts; worker w2 waits for prompts; learner is stopped (SIGSTOP)",
        waits=IDLE | {LEARNER: (on("step", 0.5),)},
        silent={1: 9},
        process={1: "stopped"},
    ),
    "an event loop blocks": Row(
        fault="blocked",
        says="worker w1 has not been heard of for 7 s though its process is there",
        silent={11: 7},
        process={11: "running"},
    ),
    "a connection is half open": Row(
        fault="silent",
        says="worker w1 has not been heard of for 7 s: frozen, cut off, or its machine is gone (process 11 on left)",
        silent={11: 7},
    ),
    "a worker is gone": Row(
        fault="gone",
        says="worker w1 has not been heard of for 7 s: its process has ended",
        silent={11: 7},
        process={11: "gone"},
    ),
    "there is no worker at all": Row(
        fault="no worker",
        says="learner waits for trajectories; there is no rollout worker",
        waits=IDLE,
        without=(11, 12),
    ),
    "there is no learner": Row(
        fault="no learner",
        says="worker w1 waits for prompts; worker w2 waits for prompts; there is no learner",
        waits=IDLE,
        without=(1,),
        bus={"leaderless": 7.0},
    ),
    "the learner is stuck in a step": Row(
        fault="step",
        says="worker w1 waits for prompts; worker w2 waits for prompts; learner has been in one training step for 26 s",
        waits=IDLE | {LEARNER: (on("step", 26, usual=2.0, limit=8.0),)},
    ),
    "the backend hangs": Row(
        fault="backend",
        says="learner's backend has not answered for 7 s (a copy of the weights",
        waits={LEARNER: (on("backend", 7, what="a copy of the weights"),)},
    ),
    "a checkpoint cannot be written": Row(
        fault="disk",
        says="learner has been writing a file for 8 s (a checkpoint to be written",
        waits={LEARNER: (on("disk", 8, what="a checkpoint to be written"),)},
    ),
    "a function of the user's after each version hangs": Row(
        fault="after_write",
        says="learner's function weights.after_write has not returned for 400 s (of version 7",
        waits={LEARNER: (on("after_write", 400, what="of version 7"),)},
    ),
    "a model cannot be read": Row(
        fault="start",
        says="worker w2 has been starting for 26 s (its engine to start)",
        waits=IDLE | {"w2": (on("start", 26, usual=0.0, limit=25.0, what="its engine to start"),)},
    ),
    "nats-server is frozen": Row(
        fault="bus",
        says="nats-server has not answered for 7 s: frozen, cut off, or its machine is gone",
        silent={1: 40, 11: 40, 12: 40},
        bus={"bus_silent": 7.0},
    ),
    "nats-server cannot be reached": Row(
        fault="bus",
        says="nats-server has not answered for 7 s: nobody answers at nats://there:4222",
        bus={"bus_silent": 7.0, "bus_problem": "nobody answers at nats://there:4222"},
    ),
    "the disk of nats-server is full": Row(
        fault="bus storage",
        says="nats-server answers but has stored nothing for 8 s: insufficient resources",
        silent={1: 8, 11: 8, 12: 8},
        bus={"bus_refuses": 8.0, "bus_problem": "insufficient resources"},
    ),
    "all prompts are failed": Row(
        fault="failed",
        says="the last 5 groups were all failed; the newest because: reward exact: raised KeyError",
        numbers={"learner/failed_in_a_row": 5.0},
        problem="reward exact: raised KeyError",
    ),
    "nothing is left to learn from": Row(
        fault="filtered",
        says="81 groups were filtered out (algorithm.filters) since the last step",
        numbers={"learner/filtered_since_step": 81.0, "learner/window": 20.0},
    ),
    "the window is full of dead groups": Row(
        fault="deadlock",
        says="nobody can go on: learner waits for trajectories; worker w1 waits for prompts; prompts waits for room in "
        "the window",
        waits=IDLE,
    ),
    "the trajectory log is full": Row(
        fault="deadlock",
        says="learner waits for trajectories; worker w1 waits for space in the trajectory log",
        waits={LEARNER: (trajectories(9),), "prompts": (room(9),), "w1": (space(9),), "w2": (space(8),)},
    ),
    "everybody waits for everybody": Row(
        fault="deadlock",
        says="learner waits for trajectories; worker w1 waits for weights of version 5",
        waits={LEARNER: (trajectories(9),), "prompts": (room(1),), "w1": (weights(9),), "w2": (weights(8),)},
    ),
    "the data has ended and groups are lost": Row(
        fault="deadlock",
        says="learner waits for trajectories; worker w1 waits for prompts; prompts waits for more data",
        waits=IDLE | {"prompts": (ENDED,)},
    ),
    "a worker's loan is not back yet": Row(
        fault="gone",
        says="learner waits for trajectories; worker w1 waits for prompts; worker w2 has not been heard of for 14 s",
        waits=IDLE,
        silent={12: 14},
        process={12: "gone"},
    ),
}


def observed(row: Row) -> Observation:
    actors = {}
    for name, pid in PROCESSES.items():
        if pid in row.without:
            continue
        is_learner = name == LEARNER
        beat = Heartbeat(
            actor=name,
            role=ROLES.get(name, FOLLOWER),
            waits=row.waits.get(name, ALL_ELSE.get(name, ()) if not row.waits else ()),
            problem=row.problem if is_learner else "",
            host=HOSTS[pid],
            pid=pid,
            numbers=row.numbers if is_learner else {},
        )
        process: Any = row.process.get(pid, "")
        actors[name] = ActorStatus(beat=beat, seconds=row.silent.get(pid, 0.0), process=process)
    return Observation(actors=actors, listened=20.0, **row.bus)


HEALTHY = Row(fault="", says="", waits=ALL_ELSE)


@pytest.mark.parametrize("row", TABLE.values(), ids=TABLE.keys())
def test_each_fault_is_named_with_its_cause_and_its_victims(row: Row) -> None:
    found = diagnose(observed(row))
    assert [finding.fault for finding in found] == [row.fault]
    assert row.says in found[0].text
    assert "\n" not in found[0].line and found[0].line.count(" -> ") == 1 and found[0].cost and found[0].remedy
    assert "GPU" not in found[0].remedy  # a fault says nothing of the machine, so its remedy fits any


def test_a_learner_that_starts_has_no_settings_to_differ_from() -> None:
    def findings(learner: dict[str, float]) -> list[str]:
        beats = {
            LEARNER: Heartbeat(actor=LEARNER, role=LEARNER, beat=1, numbers=learner),
            "w1": Heartbeat(actor="w1", role=WORKER, beat=1, numbers={SETTINGS: 1.0}),
        }
        actors = {name: ActorStatus(beat=beat) for name, beat in beats.items()}
        seen = Observation(actors=actors, listened=20.0)
        return [finding.actor for finding in other_settings(seen)]

    assert findings({}) == []
    assert findings({SETTINGS: 1.0}) == []
    assert findings({SETTINGS: 2.0}) == ["w1"]


def test_a_worker_that_cannot_read_weights_is_no_deadlock_and_needs_no_restart() -> None:
    """Its disk is full, and everybody waits for it: room there ends it, and a restart of the learner would not."""
    row = TABLE["everybody waits for everybody"]
    seen = observed(row)
    for name in ("w1", "w2"):
        beat = replace(seen.actors[name].beat, numbers={"weights/failed_reads": 5.0}, problem="No space left on device")
        seen.actors[name] = ActorStatus(beat=beat)  # type: ignore[index]
    found = diagnose(seen)
    assert [finding.fault for finding in found] == ["unreadable", "unreadable"]
    assert all("make room" in finding.remedy and "No space left" in finding.text for finding in found)
