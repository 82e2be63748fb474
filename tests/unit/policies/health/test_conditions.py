"""Conditions that do not stop the run yet are named: a run that trains the wrong thing, a disk that fills."""

from __future__ import annotations

import pytest

from asyncrl.messages import Heartbeat
from asyncrl.messages.roles import LEARNER, WORKER
from asyncrl.policies.health import conditions
from asyncrl.policies.health.conditions import CONDITIONS
from asyncrl.policies.health.diagnosis import diagnose
from asyncrl.policies.health.faults import SILENT_SECONDS, ActorStatus, Observation


def observed(numbers: dict[str, float], *, seconds: float = 0.0) -> Observation:
    learner = Heartbeat(actor=LEARNER, role=LEARNER, host="here", pid=1)
    worker = Heartbeat(actor="w0", role=WORKER, host="here", pid=7, numbers=numbers)
    return Observation(
        actors={LEARNER: ActorStatus(beat=learner), "w0": ActorStatus(beat=worker, seconds=seconds)}, listened=20.0
    )


@pytest.mark.parametrize(("number", "condition"), CONDITIONS.items(), ids=[one.fault for one in CONDITIONS.values()])
def test_condition_is_named_at_its_threshold_and_restarts_nobody(number: str, condition: conditions.Condition) -> None:
    assert diagnose(observed({number: condition.threshold * 0.99})) == []
    (found,) = diagnose(observed({number: condition.threshold}))
    assert (found.fault, found.actor, found.pid, found.cure) == (condition.fault, "w0", 7, "")
    assert found.cause.startswith("w0 ")
    assert "{" not in found.cause


def test_conditions_of_silent_actors_are_left_out() -> None:
    assert list(conditions.findings(observed({"alarm/mismatch": 1.0}, seconds=SILENT_SECONDS + 1))) == []
