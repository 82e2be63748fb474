"""Conditions that stop nothing yet: a process that runs out of something, a run that trains what it should not.

Numbers of an actor's heartbeats, each with the value from which it is a finding. A new one is a row here, and a row of
the table in tests/unit/policies/health/test_diagnosis.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from asyncrl.policies.health.faults import SILENT_SECONDS, Finding, Observation

MANY_SKIPPED: Final = 3


@dataclass(frozen=True, slots=True)
class Condition:
    """fault: its name.  says: behind the actor's name; {value} is the number.  at: found from this value on"""

    fault: str
    at: float
    says: str
    remedy: str


CONDITIONS: Final[dict[str, Condition]] = {
    "process/memory": Condition(
        "memory",
        0.95,
        "has used {value:.0%} of the memory that it may have",
        "it will be killed when there is none left, and start again; lower rollout.max_running or "
        "learner.micro_batch_tokens, or look for what your functions keep",
    ),
    "process/descriptors": Condition(
        "descriptors",
        0.9,
        "has used {value:.0%} of its file descriptors",
        "raise `ulimit -n`, or look for files and connections that your functions leave open",
    ),
    "process/threads": Condition(
        "threads",
        0.9,
        "has used {value:.0%} of the processes and threads that its user may have",
        "raise `ulimit -u`, or look for threads and processes that your functions leave behind",
    ),
    "alarm/mismatch": Condition(
        "mismatch",
        1,
        "sees that engine and trainer compute different policies (metrics.mismatch_alarm)",
        "compare their weights, precision and sampling options; mismatch/fresh_mean says by how much",
    ),
    "alarm/drop": Condition(
        "stale",
        1,
        "drops many answers as too stale (metrics.drop_alarm): mostly long ones, so training sees fewer of them",
        'raise staleness.max_staleness, or set staleness.eviction = "wait"',
    ),
    "alarm/standstill": Condition(
        "standstill",
        1,
        "trains steps without any gradient",
        "look at reward/mean and reward/same_in_group: rewards that are all equal train nothing",
    ),
    "learner/skipped_in_a_row": Condition(
        "not finite",
        MANY_SKIPPED,
        "has skipped {value:.0f} steps in a row: loss or gradient was not finite",
        "lower learner.learning_rate; the run ends after learner.max_skipped_steps of them",
    ),
}


def present(seen: Observation) -> Iterable[Finding]:
    """Of every actor that is heard."""
    for name, actor in seen.actors.items():
        if actor.seconds > SILENT_SECONDS:
            continue
        for number, condition in CONDITIONS.items():
            value = actor.beat.numbers.get(number, 0.0)
            if value >= condition.at:
                yield Finding(
                    fault=condition.fault,
                    actor=name,
                    cause=f"{name} {condition.says.format(value=value)}",
                    remedy=condition.remedy,
                    host=actor.beat.host,
                    pid=actor.beat.pid,
                )
