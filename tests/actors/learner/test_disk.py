"""A run waits for a disk that cannot be written, reports the wait, continues by itself, and loses nothing."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from asyncrl.actors.learner import checkpoint, disk
from asyncrl.audit.account import account_with
from asyncrl.audit.run_folder import RecordedRun
from asyncrl.errors import WeightsError
from asyncrl.messages import WeightVersion
from asyncrl.tensors.snapshot import Snapshot
from tests.harness.fakes import Channel, Engine, Loop, run_worker, until, worker


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(disk, "LONGEST_PAUSE_SECONDS", 0.01)


class Full:
    """Raises a disk's error while it is full. ``refused``: number of refused writes."""

    def __init__(self, number: int = errno.ENOSPC) -> None:
        self.error: Callable[[], Exception] = lambda: OSError(number, os.strerror(number))
        self.is_full, self.refused = True, 0

    def check(self) -> None:
        if self.is_full:
            self.refused += 1
            raise self.error()


@asynccontextmanager
async def going_on(loop: Loop, bus_factory: Any, full: Full) -> AsyncIterator[asyncio.Task[Any]]:
    """Run the loop with a worker until ``full`` has refused three writes. It stays full inside the block; then run to
    the end."""
    async with asyncio.TaskGroup() as group:
        group.create_task(run_worker(worker(await bus_factory(), Engine())))
        learner = group.create_task(loop.run_learner())
        await until(lambda: full.refused >= 3)
        yield learner
        full.is_full = False
    made = await account_with(RecordedRun(loop.directory), loop.bus)
    assert (made.problems, made.damage) == ((), ())
    assert (made.steps, made.incarnations, loop.backend.steps) == (loop.steps, 1, loop.steps)
    assert [row["step"] for row in loop.recorder.rows] == list(range(1, loop.steps + 1))


def room(loop: Loop) -> list[str]:
    """Return the disk waits that are in progress."""
    return [wait.what for wait in loop.learner.heartbeat().waits if wait.on == "room"]


ERRORS: dict[str, Callable[[], Exception]] = {
    "full": lambda: OSError(errno.ENOSPC, "No space left on device"),
    "over quota": lambda: OSError(errno.EDQUOT, "Disk quota exceeded"),
    "read-only": lambda: OSError(errno.EROFS, "Read-only file system"),
    "not ours": lambda: PermissionError(errno.EACCES, "Permission denied"),
    "broken": lambda: OSError(errno.EIO, "Input/output error"),
    "as a library says it": lambda: RuntimeError("Error while serializing: No space left on device (os error 28)"),
}


@pytest.mark.parametrize("kind", ERRORS)
async def test_a_checkpoint_waits_for_its_disk(
    bus_factory: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    loop = Loop(await bus_factory(), tmp_path, steps=4, checkpoint_every=2)
    full, save = Full(), loop.backend.save

    def refusing(folder: Path) -> None:
        full.check()
        save(folder)

    full.error, loop.backend.save = ERRORS[kind], refusing  # type: ignore[method-assign]
    async with going_on(loop, bus_factory, full):
        assert loop.backend.steps == 2
        (what,) = room(loop)
        assert what.startswith("room for a checkpoint (")
    said = [record.message for record in caplog.records if "disk" in record.message or "written" in record.message]
    assert sum("a checkpoint cannot be written: " in line for line in said) == 1
    assert sum("a checkpoint was written after " in line for line in said) == 1
    assert [folder.name for folder in checkpoint.list_complete(tmp_path / "checkpoints")] == [
        "step-00000002",
        "step-00000004",
    ]
    assert not list((tmp_path / "checkpoints").glob(".*"))


async def test_weights_wait_for_their_disk_while_the_learner_trains_and_the_newest_are_written(
    bus_factory: Any, tmp_path: Path
) -> None:
    full, written = Full(), list[int]()

    class Refusing(Channel):
        def publish(self, snapshot: Snapshot, *, incarnation: int, policy_version: int) -> WeightVersion:
            if policy_version >= 2:
                try:
                    full.check()
                except OSError as error:
                    raise WeightsError(
                        f"/weights: cannot write weights 0-{policy_version}: {error.strerror}"
                    ) from error
            written.append(policy_version)
            return super().publish(snapshot, incarnation=incarnation, policy_version=policy_version)

    loop = Loop(await bus_factory(), tmp_path, steps=8, max_staleness=2, channel=Refusing())
    async with going_on(loop, bus_factory, full):
        await until(lambda: loop.backend.steps >= 3)  # as far as the window allows
        assert room(loop) == ["room for weights (No space left on device)"]
    assert 2 not in written or written.index(2) < len(written) - 1
    assert written == sorted(set(written)) and written[-1] == 8


async def test_a_drain_writes_its_checkpoint_before_it_waits_for_the_disk_of_the_weights(
    bus_factory: Any, tmp_path: Path
) -> None:
    """A launcher kills what drains for too long, which would lose every step since the last checkpoint."""
    full = Full()

    class Refusing(Channel):
        def publish(self, snapshot: Snapshot, *, incarnation: int, policy_version: int) -> WeightVersion:
            if policy_version >= 2:
                full.check()
            return super().publish(snapshot, incarnation=incarnation, policy_version=policy_version)

    loop = Loop(await bus_factory(), tmp_path, steps=8, max_staleness=2, channel=Refusing())
    sampling = asyncio.create_task(run_worker(worker(await bus_factory(), Engine())))
    learning = asyncio.create_task(loop.run_learner())
    await until(lambda: full.refused >= 3 and loop.backend.steps >= 3)  # as far as the window allows
    loop.learner.drain()
    await until(lambda: bool(checkpoint.list_complete(tmp_path / "checkpoints")))
    assert not learning.done() and room(loop) == ["room for weights (No space left on device)"]
    full.is_full = False
    await learning
    sampling.cancel()
    await asyncio.wait((sampling,))
    (folder,) = checkpoint.list_complete(tmp_path / "checkpoints")
    assert folder.name == f"step-{loop.backend.steps:08d}"


async def test_a_line_of_the_history_is_on_disk_before_anybody_hears_what_it_says(
    bus_factory: Any, tmp_path: Path
) -> None:
    """Otherwise the weights of a step could be published without a record of what it trained."""
    loop = Loop(await bus_factory(), tmp_path, steps=4, checkpoint_every=2)
    full = Full()
    full.is_full = False

    def fill(step: int) -> None:
        if step == 2:
            full.is_full = True

    def refuse(history: Any) -> None:
        history._file = Refuses(history._file, full)

    loop.backend.before_step = fill
    async with asyncio.TaskGroup() as group:
        group.create_task(run_worker(worker(await bus_factory(), Engine())))
        learner = group.create_task(loop.run_learner())
        await until(lambda: hasattr(loop, "learner"))
        refuse(loop.learner._progress._history)
        await until(lambda: full.refused >= 3)
        await until(lambda: loop.recorder.rows[-1]["step"] >= 2)  # step 2 is reported during the next step
        assert loop.table.step == 3 and loop.recorder.rows[-1]["step"] == 2
        assert (tmp_path / "history.jsonl").read_bytes().count(b'"trained"') == 2
        await until(lambda: room(loop))  # reported after the refusal, by another thread
        assert room(loop) == ["room for the history (No space left on device)"]
        full.is_full = False
        await learner
    made = await account_with(RecordedRun(tmp_path), loop.bus)
    assert (made.problems, made.damage, made.steps) == ((), (), 4)


class Refuses:
    """A file on a full disk: it accepts the first bytes of a line, then none."""

    def __init__(self, file: Any, full: Full) -> None:
        self._file, self._full = file, full

    def write(self, data: bytes) -> int:
        if self._full.is_full and self._full.refused:
            self._full.check()
        if self._full.is_full:
            self._full.refused = 1
            return int(self._file.write(data[:7]))
        return int(self._file.write(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
