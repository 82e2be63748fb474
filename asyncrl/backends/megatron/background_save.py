"""Writes a rank's part of a checkpoint to disk while the next step runs.

``BackgroundSave`` copies the state to the host, where no step changes it. Training waits only for this copy. A thread
of every rank then writes the rank's own file. When all ranks are done, rank 0 completes the checkpoint
(``complete``); before that the files are not a checkpoint. The thread takes part in no collective, so it cannot block
one.

Megatron's own writer forks a process for each write, which inherits the learner's threads and connections. A thread is
enough, because torch.save to a stream releases the GIL.
Tests: tests/unit/backends/megatron/test_background_save.py.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from asyncrl.backends.models import INDEX
from asyncrl.errors import CheckpointError
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


def _copy_to_host(state: RankState) -> RankState:
    """Return a copy on the host. CUDA copies may be unfinished until the stream is synchronised."""
    chunks = []
    for chunk in state.chunks:
        home = torch.empty(chunk.data.shape, dtype=chunk.data.dtype, pin_memory=chunk.data.is_cuda)
        chunks.append(dataclasses.replace(chunk, data=home.copy_(chunk.data.detach(), non_blocking=True)))
    return dataclasses.replace(state, chunks=chunks)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFile:
    """What a rank wrote of a trained model: see RankState, and Stored for ``chunks``."""

    chunks: tuple[Stored, ...]
    steps: Mapping[str, float]
    base: str
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPart:
    """A rank's part of a checkpoint: ``files`` by trained model, once it ``is_done``, unless there is a ``problem``."""

    is_done: bool
    problem: str = ""
    files: tuple[SavedFile, ...] = ()


class BackgroundSave:
    """The states of one rank. Writing to disk begins in the constructor."""

    def __init__(self, states: Iterable[RankState], *, rank: int) -> None:
        self._rank = rank
        self._is_cancelled = threading.Event()
        self._problem = ""
        self._files: list[SavedFile] = []
        self._staged: list[RankState] = []
        try:
            self._staged = [_copy_to_host(state) for state in states]
            if any(chunk.data.is_pinned() for state in self._staged for chunk in state.chunks):
                torch.cuda.current_stream().synchronize()
        except (RuntimeError, MemoryError) as error:  # too little host memory: reported when all ranks are done
            self._problem = f"{type(error).__name__}: {error}"
        self._thread = threading.Thread(target=self._write, name="checkpoint")
        self._thread.start()

    def result(self, *, wait: bool) -> SavedPart:
        if wait:
            self._thread.join()
        if self._thread.is_alive():
            return SavedPart(is_done=False)
        return SavedPart(is_done=True, problem=self._problem, files=tuple(self._files))

    def cancel(self) -> None:
        """Skip the remaining chunks, and wait for the chunk being written."""
        self._is_cancelled.set()
        self._thread.join()

    def _write(self) -> None:
        try:
            while self._staged and not self._problem:
                state = self._staged.pop(0)
                state.folder.mkdir(exist_ok=True)  # for models other than the policy
                path = state.folder / torch_dist.file_name(self._rank)
                chunks, sha256 = torch_dist.write_chunks(path, self._until_cancelled(state.chunks))
                self._files.append(SavedFile(chunks=tuple(chunks), steps=state.steps, base=state.base, sha256=sha256))
        except Exception as error:  # an exception in a thread would go unnoticed
            self._problem = f"{type(error).__name__}: {error}"
        finally:
            self._staged.clear()

    def _until_cancelled(self, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        for chunk in chunks:
            if self._is_cancelled.is_set():
                raise CheckpointError("the rank ends")
            yield chunk


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
