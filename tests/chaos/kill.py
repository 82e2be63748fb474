"""One fault of a storm, and how the run recovered from it."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.chaos.moments import MOMENT_SECONDS
from tests.chaos.outage import Outage
from tests.chaos.victims import Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """seconds: from the kill until recovery.

    named_seconds  from the kill until `asyncrl run` reported every victim; None if it never did, or was a victim itself
    load_seconds  of the restarted learner, from process start until ready to train, as the learner reports it; None if
                  another process was killed, or the whole run was restarted
    outage        engine idle time during the outage; None if the learner was neither killed nor changed
    code          exit code of the command that changed the learner, if it was changed: 0 if the new one took over
    """

    kind: Kind
    victims: tuple[str, ...]
    seconds: float
    step: int
    named_seconds: float | None = None
    load_seconds: float | None = None
    outage: Outage | None = None
    code: int | None = None

    def as_json(self) -> dict[str, Any]:
        row = {"kill": str(self.kind), "victims": self.victims, "seconds": round(self.seconds, 3), "step": self.step}
        if self.named_seconds is not None:
            row["named_seconds"] = round(self.named_seconds, 3)
        if self.load_seconds is not None:
            row["load_seconds"] = round(self.load_seconds, 3)
        if self.outage is not None:
            row["worker_seconds"] = round(self.outage.seconds, 2)
            row["idle_seconds"] = round(self.outage.idle_seconds, 2)
        if self.code is not None and self.outage is not None:
            row |= {"code": self.code, "empty_seconds": round(self.outage.empty_seconds, 2)}
        return row


async def load_seconds(run_directory: Path, incarnation: int) -> float | None:
    """Return the load time that this incarnation's first step reports."""
    deadline = time.monotonic() + MOMENT_SECONDS
    while time.monotonic() < deadline:
        for line in reversed((run_directory / "metrics.jsonl").read_text().splitlines(keepends=True)):
            row = json.loads(line) if line.endswith("\n") else {}
            if row.get("learner/incarnation") == incarnation and "learner/load_seconds" in row:
                return float(row["learner/load_seconds"])
            if row.get("learner/incarnation", incarnation) < incarnation:
                break
        await asyncio.sleep(0.02)
    return None
