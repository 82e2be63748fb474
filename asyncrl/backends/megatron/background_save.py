"""A rank's part of a checkpoint, written to disk beside the next step.

``BackgroundSave`` copies what is to be saved to the host, where no step changes it; that is all that training waits
for. A thread of every rank then writes a file of its own. When all are done the leader puts them together
(``complete``): until then it is no checkpoint. The thread meets no other rank, so it can stand in no collective's way.

Megatron's own forks a process for each write, with the learner's threads and connections in it; torch.save to a stream
leaves the interpreter free, so a thread does.
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

from asyncrl.backends.optimizer_state import DISTRIBUTED_FORMAT, INDEX
from asyncrl.errors import CheckpointError
from asyncrl.tensors import torch_dist
from asyncrl.tensors.torch_dist import Chunk, Stored, TorchDist

_RANDOM: Final = "asyncrl.random"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """What a rank has of a trained model: ``chunks`` go to ``folder``. steps: AdamW's, by the key of the weights."""

    folder: Path
    chunks: Sequence[Chunk]
    steps: Mapping[str, float] = field(default_factory=dict)

    def staged(self) -> RankState:
        """A copy on the host, of which some may still be on its way there."""
        chunks = [dataclasses.replace(chunk, data=_on_host(chunk.data)) for chunk in self.chunks]
        return dataclasses.replace(self, chunks=chunks)


def _on_host(data: torch.Tensor) -> torch.Tensor:
    home = torch.empty(data.shape, dtype=data.dtype, pin_memory=data.is_cuda)
    return home.copy_(data.detach(), non_blocking=True)


class BackgroundSave:
    """The states of one rank, on their way to disk from the moment that this is made."""

    def __init__(self, states: Iterable[RankState], *, rank: int) -> None:
        self._rank = rank
        self._is_cancelled = threading.Event()
        self.problem = ""
        """Why it could not be written; known when it is done."""
        self._staged: list[RankState] = []
        try:
            self._staged = [state.staged() for state in states]
            if any(chunk.data.is_pinned() for state in self._staged for chunk in state.chunks):
                torch.cuda.current_stream().synchronize()
        except (RuntimeError, MemoryError) as error:  # too little memory on the host: told when all ranks have ended
            self.problem = f"{type(error).__name__}: {error}"
        self._thread = threading.Thread(target=self._write, name="checkpoint")
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        self._thread.join()

    def cancel(self) -> None:
        """Leave what is not written, and wait for the chunk that is being written."""
        self._is_cancelled.set()
        self._thread.join()

    def _write(self) -> None:
        try:
            while self._staged and not self.problem:
                self._write_state(self._staged.pop(0))
        except Exception as error:  # a thread's own end would be silent
            self.problem = f"{type(error).__name__}: {error}"
        finally:
            self._staged.clear()

    def _write_state(self, state: RankState) -> None:
        folder = state.folder
        folder.mkdir(exist_ok=True)  # of a model besides the policy
        stored, sha256 = torch_dist.write_chunks(folder / torch_dist.file_name(self._rank), self._wanted(state.chunks))
        report = {"chunks": [dataclasses.asdict(one) for one in stored], "steps": dict(state.steps), "sha256": sha256}
        _report(folder, self._rank).write_text(json.dumps(report))

    def _wanted(self, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        for chunk in chunks:
            if self._is_cancelled.is_set():
                raise CheckpointError("the rank ends")
            yield chunk


def _report(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.json"


def complete(folder: Path, *, ranks: int) -> dict[str, str]:
    """Make the files of all ranks in ``folder`` a checkpoint. SHA-256 of each, by its name. Raises CheckpointError."""
    name: Path | str = "the ranks' parts"
    try:
        reports = [json.loads(_report(folder, rank).read_text()) for rank in range(ranks)]
        torch_dist.complete(folder, (Stored(**chunk) for report in reports for chunk in report["chunks"]))
        steps = {key: step for report in reports for key, step in report["steps"].items()}
        name = INDEX
        (folder / INDEX).write_text(json.dumps({"format": DISTRIBUTED_FORMAT, "ranks": ranks, "steps": steps}))
        for rank in range(ranks):
            _report(folder, rank).unlink()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder}: cannot write {name}: {error}") from error
    return {torch_dist.file_name(rank): report["sha256"] for rank, report in enumerate(reports)}


class SavedModel(TorchDist):
    """A trained model's checkpoint in ``folder``. Raises CheckpointError."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        try:
            index: dict[str, Any] = json.loads((folder / INDEX).read_text())
            self.steps: Mapping[str, float] = index["steps"]
            """Of AdamW, by the key of the weights; of those that it has not updated, none."""
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"{folder}: not a backend checkpoint: {error}") from error

    def restore_random_states(self, rank: int) -> None:
        """This rank's random generators; rank 0's where fewer ranks wrote the checkpoint."""
        of = rank if f"{_RANDOM}.{rank}.cpu" in self else 0
        torch.set_rng_state(self.read(f"{_RANDOM}.{of}.cpu"))
        if torch.cuda.is_available() and f"{_RANDOM}.{of}.cuda" in self:
            torch.cuda.set_rng_state(self.read(f"{_RANDOM}.{of}.cuda"))


def random_states(rank: int) -> Iterator[Chunk]:
    """Of this rank's generators."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    for kind, state in states.items():
        yield Chunk(key=f"{_RANDOM}.{rank}.{kind}", whole=tuple(state.shape), start=(0,), data=state)
