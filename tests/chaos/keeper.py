"""A process that takes prompts of a run, says of each again and again that it is at work on it, and is not.

    python -m tests.chaos.keeper FOLDER COUNT PAUSE

FOLDER has the run's run.toml. It prints a line when it is there, and takes COUNT prompts, PAUSE seconds apart.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from typing import Final

from asyncrl import config, os_process
from asyncrl.messages import PromptGroup
from asyncrl.messages.topics import PROMPTS
from asyncrl.protocols import Deliveries, Delivery
from asyncrl.run import registry

KEEP_SECONDS: Final = 2.0


async def keep(folder: Path, count: int, pause: float) -> None:
    """Until we are killed."""
    run = config.load(folder / "run.toml", [f"run.directory={folder / 'runs'}"])
    bus = await registry.connect(run, token="")
    taken: list[Delivery[PromptGroup]] = []

    async def take(deliveries: Deliveries[PromptGroup]) -> None:
        while len(taken) < count:
            taken.append(await anext(deliveries))
            await asyncio.sleep(pause)

    async with bus.consume(PROMPTS) as deliveries, asyncio.TaskGroup() as group:
        print("here", flush=True)
        group.create_task(take(deliveries))
        while True:
            await asyncio.sleep(KEEP_SECONDS)
            for delivery in taken:
                await delivery.keep()


if __name__ == "__main__":
    os_process.signal_on_parent_death(signal.SIGKILL)
    asyncio.run(keep(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
