"""bus.kind = "memory": a bus inside the process of `asyncrl run`, which runs the learner and the workers as actors."""

from __future__ import annotations

from asyncrl.bus.adapter import BusAdapter
from asyncrl.bus.memory.bus import MemoryBus
from asyncrl.config import RunConfig


class MemoryBusAdapter(BusAdapter):
    is_shared = False

    @classmethod
    async def connect(cls, run: RunConfig, *, url: str, token: str, role: str, worker: str = "") -> MemoryBus:
        """Return a new bus. Every actor that uses the bus must get this instance."""
        return MemoryBus(
            max_prompts=run.window,
            max_log_bytes=run.bus.max_log_bytes,
            ack_seconds=run.bus.ack_seconds,
            max_message_bytes=run.bus.max_message_bytes,
            max_group_bytes=run.bus.max_group_bytes,
        )
