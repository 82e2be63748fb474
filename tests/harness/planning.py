"""Small runs to simulate."""

from __future__ import annotations

import dataclasses
from typing import Any

from asyncrl.planning.simulation import Plan

_PLAN = Plan(
    mode="async",
    workers=1,
    learner_machines=1,
    groups_per_batch=4,
    group_size=1,
    max_staleness=2,
    steps=1,
    warmup=0,
    seed=0,
)


def plan(**changes: Any) -> Plan:
    """Return a plan: one worker, one training copy of the model, batches of four answers, a staleness bound of two."""
    return dataclasses.replace(_PLAN, **changes)
