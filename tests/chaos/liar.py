"""A malicious worker: takes prompts of a run and answers them with lies (tests/harness/lies.py).

    python -m tests.chaos.liar FOLDER SEED COUNTS

FOLDER is the storm's folder. The bus address comes from the run's bus.json and changes at every restart of the run.
The number of stored messages is written to COUNTS. The liar takes at most half of the prompts, so that honest workers
get some; it keeps a few of them without answering.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections import deque
from pathlib import Path
from random import Random
from typing import Any, Final

from asyncrl import config, os_process
from asyncrl.adapters import registry
from asyncrl.bus.jetstream.bus import JetStreamBus
from asyncrl.errors import AsyncRLError
from asyncrl.messages import replace
from asyncrl.messages.topics import ACTORS, EVENTS, PROMPTS, TRAJECTORIES, answer_key
from tests.harness import lies

PAUSE_SECONDS: Final = 0.03
_MOST_KEPT: Final = 6
_KEEP_SECONDS: Final = 1.0
_MAX_BYTES: Final = 2**20
_TOPICS: Final = {topic.name: topic for topic in (ACTORS, EVENTS, TRAJECTORIES)}


async def lie(folder: Path, random: Random, counts: Path) -> None:
    """Lie until this process is killed."""
    run = config.load(folder / "run.toml")
    told = 0
    keeping: asyncio.Task[None] | None = None

    def note(count: int) -> None:
        counts.write_text(str(count))

    while True:
        with contextlib.suppress(AsyncRLError, OSError, ValueError, TimeoutError):
            bus: Any = await registry.connect(run, token="")
            assert isinstance(bus, JetStreamBus)
            try:
                async with bus.consume(PROMPTS) as deliveries:
                    kept: deque[Any] = deque(maxlen=_MOST_KEPT)
                    keeping = asyncio.create_task(_keep(kept))
                    while True:
                        told += await _one(bus, deliveries, random, kept)
                        note(told)
                        await asyncio.sleep(PAUSE_SECONDS)
            finally:
                if keeping is not None:
                    keeping.cancel()
                with contextlib.suppress(AsyncRLError, OSError, TimeoutError):
                    await bus.close()
        await asyncio.sleep(0.2)


async def _keep(kept: deque[Any]) -> None:
    """Keep postponing the redelivery of the kept prompts."""
    while True:
        await asyncio.sleep(_KEEP_SECONDS)
        for delivery in list(kept):
            with contextlib.suppress(AsyncRLError):
                await delivery.keep()


async def _one(bus: JetStreamBus, deliveries: Any, random: Random, kept: deque[Any]) -> int:
    """Take one prompt: keep it, give it back, or answer it, usually with a lie. An answer is sometimes followed by a
    second message. Return how many messages were stored."""
    async with asyncio.timeout(5.0):
        delivery = await anext(deliveries)
    prompt = delivery.message
    if random.random() < 0.02:
        kept.append(delivery)
        return 0
    if prompt is None or random.random() < 0.1:
        await delivery.retry()
        return 0
    key = answer_key(prompt.group_id, worker="evil", ticket=prompt.ticket)
    await _put(bus, "trajectories", key, lies.answer_to(prompt, random, max_bytes=_MAX_BYTES))
    await delivery.ack()
    if random.random() < 0.5:
        return 1
    key = lies.key_of_nobody(random, newest=prompt.group_id)
    other = replace(prompt, group_id=max(0, prompt.group_id + random.randint(-20, 20)))
    unlent = lies.answer_to(other, random, max_bytes=_MAX_BYTES)
    topic, key, data = random.choice(
        [
            ("trajectories", key, random.randbytes(50)),
            ("trajectories", str(other.group_id), unlent),  # a group that the liar was usually not lent
            ("trajectories", answer_key(other.group_id, worker="evil", ticket=random.randbytes(16).hex()), unlent),
            lies.said_elsewhere(random),
        ]
    )
    await _put(bus, topic, key, data)
    return 2


async def _put(bus: JetStreamBus, topic: str, key: str, data: bytes) -> None:
    """Store raw bytes, where ``publish`` would take a message."""
    subject = bus._layout.subject(_TOPICS[topic], key)
    await bus._connection.store(subject, data, headers={})


if __name__ == "__main__":
    os_process.signal_on_parent_death(signal.SIGKILL)
    asyncio.run(lie(Path(sys.argv[1]), Random(int(sys.argv[2])), Path(sys.argv[3])))
