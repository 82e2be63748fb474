"""A rank on a Ray cluster meets the learner that is there now. Needs no cluster."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.launch.launchers.process_agent import OutputChunk, StartResult
from asyncrl.launch.launchers.ray import Options, RayLauncher, RayProcess
from asyncrl.launch.port import ProcessSpec
from asyncrl.messages.roles import LEARNER, LEARNER_RANK


class Ended:
    """Stands in for the actor of a process that has ended."""

    @property
    def news(self) -> Any:
        async def remote(_: int) -> OutputChunk:
            return OutputChunk(lines=(), last=0, code=1)

        return SimpleNamespace(remote=remote)


async def test_rank_waits_for_the_place_of_the_restarted_learner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one's machine may be gone, and with it the address."""
    launcher = RayLauncher(run_name="test", log_directory=tmp_path, options=Options())
    monkeypatch.setattr(launcher, "kill", lambda actor: None)
    spec = ProcessSpec(name="learner-1", role=LEARNER_RANK, arguments=(), meets=LEARNER)
    await launcher._wait_for_those_before(spec)
    assert await RayProcess(Ended(), launcher, name=LEARNER, started=StartResult()).wait() == 1
    waiting = asyncio.ensure_future(launcher._wait_for_those_before(spec))
    await asyncio.wait({waiting}, timeout=0.05)
    assert not waiting.done()
    async with launcher._placed:  # as when the next one has a machine
        launcher._unplaced.discard(LEARNER)
        launcher._placed.notify_all()
    await waiting
