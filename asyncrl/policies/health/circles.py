"""Findings that blame no single part: actors that wait in a circle, or for something that will not come.

diagnosis.py finds the circles. Tests: tests/unit/policies/health/test_diagnosis.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from asyncrl.policies.groups.overdue import KEPT, REISSUES_LEFT
from asyncrl.policies.health.faults import Cure, Finding

ECHOES: Final = ("window", "log", "deadlock", "kept", "data")
"""Faults that are only consequences: another fault elsewhere leaves the remaining actors in them."""


def circle(fault: str, who: str, seconds: float, host: str, pid: int) -> Finding:
    cause, remedy, cure = CIRCLES[fault]
    return Finding(
        fault=fault,
        actor="run",
        cause=f"{cause}: {who}",
        remedy=remedy,
        seconds=seconds,
        cure=cure,
        host=host,
        pid=pid,
        is_joint=True,
    )


CIRCLES: Final[Mapping[str, tuple[str, str, Cure]]] = {
    "window": (
        "the window is full of groups that nobody works on",
        "prompts of a dead worker are redelivered after bus.ack_seconds; a learner restarted with --resume republishes "
        "what the bus lost",
        "restart",
    ),
    "log": (
        "the trajectory log is full before a batch is in it",
        "raise bus.max_log_bytes or lower checkpoint.every_steps",
        "end",
    ),
    "deadlock": ("everybody waits for somebody else", "restart the learner with --resume", "restart"),
}


def ended(seconds: float, host: str, pid: int) -> Finding:
    return Finding(
        fault="data",
        actor="run",
        cause="the data has ended, and groups that would fill the last batch do not come back",
        remedy="a learner restarted with --resume republishes them; or raise data.epochs",
        seconds=seconds,
        cure="restart",
        host=host,
        pid=pid,
        is_joint=True,
    )


def unanswered(finding: Finding, numbers: Mapping[str, float]) -> Finding:
    """Return the finding without a cure while the learner, whose ``numbers`` these are, reissues the prompts.

    No cure is needed while reissues are left, and none helps if a client takes every prompt.
    """
    if finding.fault not in ("window", "data"):
        return finding
    if kept := numbers.get(KEPT):
        return replace(
            finding,
            fault="kept",
            cause=f"{kept:.0f} prompts were taken by somebody who answers none, and of whom no heartbeat is heard",
            remedy="the run goes on by itself once that ends: the prompts are issued again each "
            "rollout.reissue_seconds; look for a client that is none of the run's (nats-server's /connz names them), "
            "and give the run new passwords (bin/nats-config)",
            cure="",
        )
    if not numbers.get(REISSUES_LEFT):
        return finding
    remedy = f"the learner issues unanswered prompts again (rollout.reissue_seconds); after that: {finding.remedy}"
    return replace(finding, remedy=remedy, cure="")
