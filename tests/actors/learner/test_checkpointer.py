"""A checkpoint is written in the background during the next steps and counts only when all of it is on disk."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from asyncrl.actors.learner import checkpoint
from asyncrl.audit.account import account_with
from asyncrl.audit.run_folder import RecordedRun
from asyncrl.errors import BackendError
from tests.harness.fakes import Backend, Engine, Loop, run_all, run_worker, worker


class SavingBeside(Backend):
    """A backend that writes a checkpoint when the test allows it."""

    def __init__(self) -> None:
        super().__init__()
        self.may_write = threading.Event()
        self.refused = 0
        """How many writes the disk still refuses."""
        self._copy = 0

    def begin_save(self, folder: Path) -> None:
        self._copy = self.steps

    def finish_save(self, folder: Path, *, wait: bool) -> Mapping[Path, str] | None:
        if not wait and not self.may_write.is_set():
            return None
        assert self.may_write.wait(60), "nobody lets it write"
        if self.refused:
            self.refused -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        (folder / "steps").write_text(str(self._copy))
        return {}


@pytest.fixture
def beside(loop: Loop) -> SavingBeside:
    loop.backend = SavingBeside()
    loop.checkpoint_every = 2
    return loop.backend


def steps_saved(loop: Loop) -> dict[str, str]:
    folders = checkpoint.list_complete(loop.directory / "checkpoints")
    return {folder.name: (folder / "backend" / "steps").read_text() for folder in folders}


async def test_the_next_step_goes_on_while_a_checkpoint_is_written(
    loop: Loop, beside: SavingBeside, bus_factory: Any
) -> None:
    """The checkpoint holds the model as it was when the save began."""
    found: list[dict[str, str]] = []

    def look(step: int) -> None:
        if step == 3:  # the second step since the save began
            found.append(steps_saved(loop))
            beside.may_write.set()

    beside.before_step = look
    await run_all(loop, worker(await bus_factory(), Engine()))
    assert found == [{}]
    assert steps_saved(loop) == {"step-00000002": "2", "step-00000004": "4"}
    assert not list((loop.directory / "checkpoints").glob(".*")), "nothing unfinished is left"


async def test_a_learner_that_dies_while_it_writes_goes_on_from_the_checkpoint_before(
    loop: Loop, beside: SavingBeside, bus_factory: Any, tmp_path: Path
) -> None:
    """The log keeps every entry that the missing checkpoint would have covered."""

    def die(step: int) -> None:
        if step == 3:
            raise BackendError("killed")

    beside.before_step = die
    task = asyncio.create_task(run_worker(worker(await bus_factory(), Engine())))
    with pytest.raises(BackendError, match="killed"):
        await loop.run_learner()
    assert steps_saved(loop) == {}
    loop.backend = second = SavingBeside()
    second.may_write.set()
    await loop.run_learner(resume=True)
    await task
    assert second.steps == 4
    account = await account_with(RecordedRun(loop.directory), loop.bus)
    assert (account.problems, account.lost, account.duplicated, account.trained) == ((), 0, 0, 8)
    assert [name.partition("-epoch")[0] for name in steps_saved(loop)] == ["step-00000002", "step-00000004"]
    assert not list((loop.directory / "checkpoints").glob(".*"))


async def test_what_the_disk_did_not_take_is_written_again_at_the_next_step(
    loop: Loop, beside: SavingBeside, bus_factory: Any
) -> None:
    beside.may_write.set()
    beside.refused = 1
    loop.steps = 5
    loop.checkpoint_every = 4  # the first checkpoint cannot be written
    await run_all(loop, worker(await bus_factory(), Engine()))
    assert steps_saved(loop) == {"step-00000005": "5"}
