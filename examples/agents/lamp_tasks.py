"""An unchanged taskset of verifiers (0.4) without any training code. Programs of verifiers play its tasks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf

LAMPS = {"Koro": "7", "Mava": "3", "Tilo": "5"}


class LampData(vf.TaskData):
    answer: str = ""


class LampTask(vf.Task[LampData]):
    @vf.reward
    async def right(self, trace: Any) -> float:
        return float(self.data.answer in trace.last_reply)


class LampTasks(vf.Taskset):
    def load(self) -> Iterator[LampTask]:
        for name, count in LAMPS.items():
            yield LampTask(LampData(prompt=f"How many lamps has {name} with {count} lamps?", answer=count))


__all__ = ["LampTasks"]
