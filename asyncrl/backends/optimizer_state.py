"""Optimizer state on disk as the reference backend writes it, and the megatron backend did before format 3.

There is one safetensors file per rank, which any number of ranks can read. A rank owns pieces of parameters:
``name[start:start + len]`` of the flattened parameter. A piece is saved as its float32 value and AdamW's state, each
under ``kind|start|name``. To restore, a rank assembles each parameter from the pieces in all files and takes its own
part. Under tensor parallelism, a parameter here is the shard of one rank, so only the same number of tensor-parallel
ranks can read the state.
Test: test_restored_training_equals_uninterrupted_training.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from asyncrl.errors import CheckpointError, ConfigError

FORMAT = 2
DISTRIBUTED_FORMAT = 3
"""Format of the megatron backend: Megatron's own, which any layout can read (megatron/background_save.py)."""
INDEX = "backend.json"
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # of torch.optim.AdamW


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One rank's part of a parameter: its flattened elements from ``start`` on."""

    name: str
    start: int
    value: torch.Tensor
    """The float32 tensor that the optimizer updates; also its key in the optimizer's state."""


def write_pieces(folder: Path, pieces: Iterable[Piece], state: Mapping[torch.Tensor, Any], *, rank: int) -> None:
    """Write this rank's file. Raises CheckpointError."""
    tensors = {f"random||{kind}": value for kind, value in _random_states().items()}
    for piece in pieces:
        tensors[f"value|{piece.start}|{piece.name}"] = _plain(piece.value)
        moments = state.get(piece.value, {})
        for kind in _MOMENTS:
            if kind in moments:
                tensors[f"{kind}|{piece.start}|{piece.name}"] = _plain(torch.as_tensor(moments[kind]))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / _file(rank))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: cannot write rank {rank}'s optimizer state: {error}") from error


def write_index(folder: Path, *, ranks: int, tensor_parallel: int = 1) -> None:
    """Write the index that completes the checkpoint, once all ranks' files exist. Raises CheckpointError."""
    try:
        (folder / INDEX).write_text(json.dumps({"format": FORMAT, "ranks": ranks, "tensor_parallel": tensor_parallel}))
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot write {INDEX}: {error}") from error


class SavedState:
    """The pieces in the files of all ranks."""

    def __init__(self, files: list[Any], folder: Path) -> None:
        self._files = files
        self._folder = folder
        self._where: dict[tuple[str, str], list[tuple[int, str, Any]]] = {}
        for file in files:
            for key in file.keys():  # noqa: SIM118 (safe_open is no mapping)
                kind, start, name = key.split("|", 2)
                if start:
                    self._where.setdefault((kind, name), []).append((int(start), key, file))

    def value(self, name: str, size: int) -> torch.Tensor:
        """Return a whole flat parameter, f32[size]. Raises CheckpointError if it is missing or has another size."""
        return self._whole("value", name, size)

    def moments(self, name: str, size: int, own: slice) -> dict[str, torch.Tensor]:
        """Return AdamW's state for the slice ``own`` of a parameter; empty before its first step."""
        if ("step", name) not in self._where:
            return {}
        _, key, file = self._where["step", name][0]
        whole = {kind: self._whole(kind, name, size)[own] for kind in ("exp_avg", "exp_avg_sq")}
        return {"step": file.get_tensor(key), **whole}

    def restore_random_states(self, rank: int) -> None:
        """Restore this rank's random generators, or those of rank 0 if the checkpoint has fewer ranks."""
        file = self._files[rank if rank < len(self._files) else 0]
        torch.set_rng_state(file.get_tensor("random||cpu"))
        if torch.cuda.is_available() and "random||cuda" in file.keys():  # noqa: SIM118
            torch.cuda.set_rng_state(file.get_tensor("random||cuda"))

    def _whole(self, kind: str, name: str, size: int) -> torch.Tensor:
        places = sorted(self._where.get((kind, name), []), key=lambda place: place[0])
        parts = [file.get_tensor(key) for _, key, file in places]
        whole = torch.cat(parts) if parts else torch.empty(0)
        if whole.numel() != size:
            raise CheckpointError(
                f"{self._folder}: {name} has {whole.numel()} saved elements ({kind}), the model needs {size}; "
                "is this a checkpoint of another model?"
            )
        return whole


def format_of(folder: Path) -> int:
    """Return the format of a backend checkpoint, or 0 if there is no readable one."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        return int(json.loads((folder / INDEX).read_text())["format"])
    return 0


def base_of(folder: Path) -> str:
    """Return the fingerprint of the model whose adapters are in a backend checkpoint, or "" if it does not say."""
    with suppress(OSError, ValueError, TypeError, AttributeError):
        return str(json.loads((folder / INDEX).read_text()).get("base", ""))
    return ""


def saved_ranks(folder: Path, *, tensor_parallel: int) -> int:
    """Return how many ranks wrote the checkpoint.

    Raises CheckpointError; ConfigError if another number of tensor-parallel ranks wrote it.
    """
    try:
        index = json.loads((folder / INDEX).read_text())
        if index["format"] != FORMAT:
            raise CheckpointError(f"{folder}: format {index['format']}; this version reads format {FORMAT}")
        if index["tensor_parallel"] != tensor_parallel:
            raise ConfigError(  # a restart would not help
                f"learner.tensor_parallel: {folder} was written with {index['tensor_parallel']}, and cannot be read "
                f"with {tensor_parallel}; resume with learner.tensor_parallel = {index['tensor_parallel']}"
            )
        return int(index["ranks"])
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder}: not a backend checkpoint: {error}") from error


@contextmanager
def open_state(folder: Path, *, tensor_parallel: int = 1) -> Iterator[SavedState]:
    """Open the checkpoint in ``folder``. Raises the same errors as ``saved_ranks``."""
    ranks = saved_ranks(folder, tensor_parallel=tensor_parallel)
    try:
        with ExitStack() as stack:
            files = [stack.enter_context(safe_open(folder / _file(rank), framework="pt")) for rank in range(ranks)]
            yield SavedState(files, folder)
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder}: not a backend checkpoint: {error}") from error


def shaped(moments: dict[str, torch.Tensor], like: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return moments in the shape and on the device of their tensor. Fused AdamW needs its step count there as well."""
    return {
        kind: value.to(like.device, copy=True).reshape(() if kind == "step" else like.shape)
        for kind, value in moments.items()
    }


def _random_states() -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _plain(value: torch.Tensor) -> torch.Tensor:
    """Return a flat copy on the CPU that shares no memory, as safetensors requires."""
    return value.detach().reshape(-1).to("cpu", copy=True)


def _file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"
