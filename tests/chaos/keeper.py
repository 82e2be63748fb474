"""Takes prompts of a run and keeps postponing their redelivery, without ever answering them.

    python -m tests.chaos.keeper FOLDER COUNT PAUSE REQUESTS

FOLDER contains the run's run.toml. The process prints a line once it is connected. Then REQUESTS concurrent consumers
take COUNT prompts in total. Each consumer pauses PAUSE seconds after every prompt.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from pathlib import Path
from typing import Final

from asyncrl import config, os_process
from asyncrl.adapters import registry
from asyncrl.bus.port import Deliveries, Delivery
from asyncrl.messages import PromptGroup
from asyncrl.messages.topics import PROMPTS

KEEP_SECONDS: Final = 2.0


async def keep(folder: Path, count: int, pause: float, requests: int) -> None:
    """Keep prompts until this process is killed."""
    run = config.load(folder / "run.toml", [f"run.directory={folder / 'runs'}"])
    bus = await registry.connect(run, token="")
    taken: list[Delivery[PromptGroup]] = []

    async def take(deliveries: Deliveries[PromptGroup]) -> None:
        while len(taken) < count:
            taken.append(await anext(deliveries))
            await asyncio.sleep(pause)

    async with contextlib.AsyncExitStack() as stack:
        consumers = [await stack.enter_async_context(bus.consume(PROMPTS)) for _ in range(requests)]
        group = await stack.enter_async_context(asyncio.TaskGroup())
        for deliveries in consumers:
            group.create_task(take(deliveries))
        print("here", flush=True)
        while True:
            await asyncio.sleep(KEEP_SECONDS)
            for delivery in taken:
                await delivery.keep()


if __name__ == "__main__":
    os_process.signal_on_parent_death(signal.SIGKILL)
    asyncio.run(keep(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])))
