"""Writes a rank's part of a checkpoint to disk while the next step runs.

A thread of every rank copies the state to the host, chunk by chunk, and writes the rank's own file. It copies ahead of
the disk as far as there is room (``free_room``): usually everything, before the next update changes the weights. With
less room that update waits until the rest is copied (``wait_until_copied``), which is as long as the disk takes; there
are never copies of more than the room and the chunk that is being written. When all ranks are done, rank 0 completes
the checkpoint (``complete``); before that the files are not a checkpoint. The thread takes part in no collective, so it
cannot block one.

Megatron's own writer forks a process for each write, which inherits the learner's threads and connections. A thread is
enough, because torch.save to a stream releases the GIL.
Tests: tests/unit/backends/megatron/test_background_save.py.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from asyncrl.backends.models import INDEX
from asyncrl.errors import CheckpointError, disk_problem
from asyncrl.tensors import torch_dist
from asyncrl.tensors.torch_dist import Chunk, Stored, TorchDist

STATE: Final = "optimizer.state."
"""Start of the keys of optimizer state; the rest says which, and of which weight."""
_RANDOM: Final = "asyncrl.random"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """A rank's state of a trained model: ``chunks`` go to ``folder``.

    steps  AdamW's step counts by weight key
    base   fingerprint of the weights below adapters, from rank 0
    """

    folder: Path
    chunks: Sequence[Chunk]
    steps: Mapping[str, float] = field(default_factory=dict)
    base: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFile:
    """What a rank wrote of a trained model: see RankState, and Stored for ``chunks``."""

    chunks: tuple[Stored, ...]
    steps: Mapping[str, float]
    base: str
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPart:
    """A rank's part of a checkpoint: ``files`` by trained model, once it ``is_done``, unless there is a ``problem``.

    errno: of a disk that cannot be written now, which the learner waits for; 0 for other problems
    """

    is_done: bool
    problem: str = ""
    errno: int = 0
    files: tuple[SavedFile, ...] = ()


class BackgroundSave:
    """The states of one rank. Copying and writing begin in the constructor.

    They are of the work that the device has queued until then. Nothing may change them before ``wait_until_copied``.
    """

    def __init__(self, states: Sequence[RankState], *, rank: int, room: int) -> None:
        """room: bytes of copies that may wait for the disk"""
        self._rank = rank
        self._room = room
        self._is_cancelled = threading.Event()
        self._is_copied = threading.Event()
        self._problem, self._errno = "", 0
        self._files: list[SavedFile] = []
        self._states = states
        device = next((chunk.data.device for state in states for chunk in state.chunks if chunk.data.is_cuda), None)
        self._stream = None if device is None else torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))
        self._thread = threading.Thread(target=self._write, name="checkpoint")
        self._thread.start()

    def wait_until_copied(self) -> None:
        """Wait until the states may change."""
        self._is_copied.wait()

    def result(self, *, wait: bool) -> SavedPart:
        if wait:
            self._thread.join()
        if self._thread.is_alive():
            return SavedPart(is_done=False)
        return SavedPart(is_done=True, problem=self._problem, errno=self._errno, files=tuple(self._files))

    def cancel(self) -> None:
        """Skip the remaining chunks, and wait for the chunk being written."""
        self._is_cancelled.set()
        self._thread.join()

    def _write(self) -> None:
        states, self._states = self._states, ()
        copies = self._copies(itertools.chain.from_iterable(state.chunks for state in states))
        try:
            for state in states:
                state.folder.mkdir(exist_ok=True)  # for models other than the policy
                path = state.folder / torch_dist.file_name(self._rank)
                chunks, sha256 = torch_dist.write_chunks(path, itertools.islice(copies, len(state.chunks)))
                self._files.append(SavedFile(chunks=tuple(chunks), steps=state.steps, base=state.base, sha256=sha256))
        except Exception as error:  # an exception in a thread would go unnoticed; too little memory is one
            self._problem = f"{type(error).__name__}: {error}"
            disk = disk_problem(error)
            self._errno = disk.errno or 0 if disk else 0
        finally:
            self._is_copied.set()

    def _copies(self, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        """Yield copies on the host, and copy ahead while there is room."""
        ahead, num_bytes = deque[Chunk](), 0
        for chunk in chunks:
            while ahead and num_bytes + chunk.data.nbytes > self._room:
                num_bytes -= ahead[0].data.nbytes
                yield self._copied(ahead.popleft())
            ahead.append(self._begin_copy(chunk))
            num_bytes += chunk.data.nbytes
        if self._stream is not None:
            self._stream.synchronize()
        self._is_copied.set()
        while ahead:
            yield self._copied(ahead.popleft())

    def _begin_copy(self, chunk: Chunk) -> Chunk:
        self._end_if_cancelled()
        with torch.cuda.stream(self._stream):
            home = torch.empty(chunk.data.shape, dtype=chunk.data.dtype, pin_memory=chunk.data.is_cuda)
            return dataclasses.replace(chunk, data=home.copy_(chunk.data.detach(), non_blocking=True))

    def _copied(self, chunk: Chunk) -> Chunk:
        self._end_if_cancelled()
        if self._stream is not None:
            self._stream.synchronize()
        return chunk

    def _end_if_cancelled(self) -> None:
        if self._is_cancelled.is_set():
            raise CheckpointError("the rank ends")


def free_room(ranks: int) -> int:
    """Return the bytes of copies that each of a machine's ``ranks`` may hold: half of what the machine has free."""
    return _free_bytes() // (2 * ranks)


def _free_bytes() -> int:
    """Return the memory that the machine, or this container, can give; 2 GiB where nothing says it."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = 1024 * int(lines["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        return 2**31
    group = Path("/sys/fs/cgroup")
    try:
        cache = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())["inactive_file"]
        used = int((group / "memory.current").read_text()) - int(cache)
        return max(0, min(free, int((group / "memory.max").read_text()) - used))
    except (OSError, KeyError, ValueError):  # no container, or one without a limit
        return free


def complete(folder: Path, files: Sequence[SavedFile]) -> dict[str, str]:
    """Turn the files of all ranks in ``folder`` into a checkpoint. Returns their SHA-256 by name.

    Raises CheckpointError.
    """
    steps = {key: step for file in files for key, step in file.steps.items()}
    index = {"format": "torch_dist", "ranks": len(files), "steps": steps, "base": files[0].base}
    try:
        torch_dist.complete(folder, (chunk for file in files for chunk in file.chunks))
        (folder / INDEX).write_text(json.dumps(index))
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot write {INDEX} beside the ranks' files: {error}") from error
    return {torch_dist.file_name(rank): file.sha256 for rank, file in enumerate(files)}


class SavedModel(TorchDist):
    """Reads a trained model's checkpoint in ``folder``. Raises CheckpointError."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        try:
            index: dict[str, Any] = json.loads((folder / INDEX).read_text())
            self.steps: Mapping[str, float] = index["steps"]
            """AdamW's step counts by weight key; weights that AdamW has not updated are absent."""
            self.base: str = index["base"]
            """Fingerprint of the weights below adapters; "" without adapters."""
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"{folder}: not a backend checkpoint: {error}") from error

    def weights(self) -> set[str]:
        """Return the keys of all weights, whichever ranks wrote them."""
        return {key for key in self.keys() if not key.startswith((STATE, _RANDOM))}

    @property
    def lacks_moments(self) -> bool:
        """Whether AdamW had moments that were not saved."""
        return bool(self.steps) and not any(key.startswith(f"{STATE}exp_avg.") for key in self.keys())

    def restore_random_states(self, rank: int) -> None:
        """Restore this rank's random generators, or rank 0's if fewer ranks wrote the checkpoint."""
        of = rank if f"{_RANDOM}.{rank}.cpu" in self else 0
        torch.set_rng_state(self.read(f"{_RANDOM}.{of}.cpu"))
        if torch.cuda.is_available() and f"{_RANDOM}.{of}.cuda" in self:
            torch.cuda.set_rng_state(self.read(f"{_RANDOM}.{of}.cuda"))


def random_states(rank: int) -> Iterator[Chunk]:
    """Yield the states of this rank's random generators."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    for kind, state in states.items():
        yield Chunk(key=f"{_RANDOM}.{rank}.{kind}", whole=tuple(state.shape), start=(0,), data=state)
