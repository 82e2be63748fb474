"""A custom bus: the memory bus, with a count of published messages."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from asyncrl.bus.adapter import BusAdapter
from asyncrl.bus.memory.bus import MemoryBus
from asyncrl.config import RunConfig
from asyncrl.messages.topics import Topic

M = TypeVar("M")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    log: str = ""
    """File that receives the counts, one line per topic, when the bus is closed."""


class CountingBus(MemoryBus):
    def __init__(self, *, log: str, **sizes: Any) -> None:
        super().__init__(**sizes)
        self._file = log
        self.published: Counter[str] = Counter()

    async def publish(self, topic: Topic[M], message: M, *, key: str, again: bool = False) -> bool:
        self.published[topic.name] += 1
        return await super().publish(topic, message, key=key, again=again)

    async def close(self) -> None:
        if self._file:
            self._write()

    def _write(self) -> None:
        Path(self._file).write_text("".join(f"{name} {count}\n" for name, count in self.published.items()))


class CountingBusAdapter(BusAdapter):
    """bus.kind = "tests.integration.extending.toy_bus:CountingBusAdapter" """

    options_type = Options
    is_shared = False

    @classmethod
    async def connect(cls, run: RunConfig, *, url: str, token: str, role: str, worker: str = "") -> CountingBus:
        return CountingBus(
            log=cls.options(run).log,
            max_prompts=run.window,
            max_log_bytes=run.bus.max_log_bytes,
            ack_seconds=run.bus.ack_seconds,
            max_message_bytes=run.bus.max_message_bytes,
            max_group_bytes=run.bus.max_group_bytes,
        )
