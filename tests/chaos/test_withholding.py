"""A client that takes prompts and keeps them, and beside it says nothing: it costs a wait, not the run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl import config
from asyncrl.messages import PromptGroup
from asyncrl.messages.topics import PROMPTS
from asyncrl.protocols import Deliveries, Delivery
from asyncrl.run import registry
from asyncrl.state.history import HISTORY_FILE, last_incarnation
from tests.harness.faults.run import prepare, running
from tests.harness.forked import ForkServer

KEEP_SECONDS = 2.0
LEAVE_SECONDS = 10.0


@contextlib.contextmanager
def keeping(folder: Path, count: int) -> Iterator[None]:
    """Inside, somebody takes ``count`` prompts, says of each again and again that it is at work, and is not."""
    run = config.load(folder / "run.toml", [f"run.directory={folder / 'runs'}"])
    is_taken, is_over = threading.Event(), threading.Event()

    async def take(deliveries: Deliveries[PromptGroup], taken: list[Delivery[PromptGroup]]) -> None:
        while len(taken) < count:
            taken.append(await anext(deliveries))
            is_taken.set()

    async def keep() -> None:
        bus = await registry.connect(run, token="")
        try:
            async with bus.consume(PROMPTS) as deliveries:
                taken: list[Delivery[PromptGroup]] = []
                taking = asyncio.create_task(take(deliveries, taken))
                while not is_over.is_set():
                    for delivery in taken:
                        await delivery.keep()
                    await asyncio.to_thread(is_over.wait, KEEP_SECONDS)
                taking.cancel()
        finally:
            is_taken.set()
            await bus.close()

    keeper = threading.Thread(target=lambda: asyncio.run(keep()), daemon=True)
    keeper.start()
    is_taken.wait()
    try:
        yield
    finally:
        is_over.set()
        keeper.join(LEAVE_SECONDS)  # behind a run that has ended it waits for a bus that never comes back


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_hold_for_prompts_that_somebody_keeps_is_no_deadlock(tmp_path: Path, forks: ForkServer) -> None:
    """Everybody waits for somebody else meanwhile, for longer than a deadlock may last. Nothing is restarted for it."""
    prepare(tmp_path)
    settings = ("run.stall_seconds=7", "run.restarts=0", "staleness.wait_seconds=25", "rollout.reissue_seconds=0")
    with running(tmp_path, *settings, forks=forks) as run, keeping(tmp_path, 2):
        run.wait_for_steps(10)
        metrics = (tmp_path / "runs" / "faults" / "metrics.jsonl").read_text().splitlines()
        assert max(json.loads(line)["learner/held_seconds"] for line in metrics) >= 25
        assert not [line for line in run.said if "the window is full" in line]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_client_that_keeps_every_prompt_costs_a_pause_and_no_restart(tmp_path: Path, forks: ForkServer) -> None:
    """Two batches of eight fill the window: nothing is left to train, and nobody else has anything to do. Of what is
    issued again it keeps its share, too."""
    prepare(tmp_path)
    settings = ("run.stall_seconds=7", "run.restarts=0", "rollout.reissue_seconds=5")
    with running(tmp_path, *settings, forks=forks) as run, keeping(tmp_path, 16):
        run.wait_for_steps(10)
        assert run.wait_for("were taken and are not answered")
    assert last_incarnation(tmp_path / "runs" / "faults" / HISTORY_FILE) == 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_client_that_keeps_a_prompt_of_the_last_step_does_not_keep_the_run_from_its_end(
    tmp_path: Path, forks: ForkServer
) -> None:
    prepare(tmp_path)
    settings = ("run.stall_seconds=7", "run.restarts=0", "rollout.reissue_seconds=5", "run.steps=20")
    with running(tmp_path, *settings, forks=forks) as run, keeping(tmp_path, 2):
        assert run.process.wait(600) == 0
