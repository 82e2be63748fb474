"""A trained model's state as the reference backend writes it, and the index that both backends write beside theirs.

state.safetensors holds each weight under ``value|NAME``, AdamW's state under ``step|NAME``, ``exp_avg|NAME`` and
``exp_avg_sq|NAME``, and the random generators under ``random|cpu`` and ``random|cuda``. The megatron backend writes
Megatron's own format (megatron/background_save.py).
Test: test_restored_training_equals_uninterrupted_training.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from asyncrl.errors import CheckpointError

INDEX: Final = "backend.json"
"""Written last, so a folder without it is no checkpoint."""
STATE_FILE: Final = "state.safetensors"
_MOMENTS: Final = ("step", "exp_avg", "exp_avg_sq")  # of torch.optim.AdamW


def write(folder: Path, weights: Mapping[str, torch.Tensor], state: Mapping[torch.Tensor, Any]) -> None:
    """Write all weights, the optimizer's ``state`` by weight, and the random generators. Raises CheckpointError."""
    tensors = {"random|cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors["random|cuda"] = torch.cuda.get_rng_state()
    for name, weight in weights.items():
        tensors[f"value|{name}"] = _plain(weight)
        moments = state.get(weight, {})
        tensors |= {f"{kind}|{name}": _plain(torch.as_tensor(moments[kind])) for kind in _MOMENTS if kind in moments}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / STATE_FILE)
        (folder / INDEX).write_text(json.dumps({"format": "reference"}))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: cannot write the state of the backend: {error}") from error


class SavedState:
    """The tensors in ``folder``. Raises CheckpointError if it holds no state of the reference backend."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            written_as = json.loads((folder / INDEX).read_text())["format"]
            if written_as != "reference":
                raise ValueError(f"the format is {written_as!r}; resume with the backend that wrote it")
            self._tensors: dict[str, torch.Tensor] = load_file(folder / STATE_FILE)
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{folder}: not a checkpoint of the reference backend: {error}") from error

    def value(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """Return a weight in the shape of ``like``. Raises CheckpointError if it is missing or has another size."""
        return self._tensor("value", name, like.numel()).view(like.shape)

    def moments(self, name: str, like: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return AdamW's state of a weight; empty before its first step."""
        if f"step|{name}" not in self._tensors:
            return {}
        sizes = {"step": 1, "exp_avg": like.numel(), "exp_avg_sq": like.numel()}
        return reshape_moments({kind: self._tensor(kind, name, size) for kind, size in sizes.items()}, like)

    def restore_random_states(self) -> None:
        """Restore the random generators of this process."""
        torch.set_rng_state(self._tensors["random|cpu"])
        if torch.cuda.is_available() and "random|cuda" in self._tensors:
            torch.cuda.set_rng_state(self._tensors["random|cuda"])

    def _tensor(self, kind: str, name: str, size: int) -> torch.Tensor:
        tensor = self._tensors.get(f"{kind}|{name}", torch.empty(0))
        if tensor.numel() != size:
            raise CheckpointError(
                f"{self._folder}: {name} has {tensor.numel()} saved elements ({kind}), the model needs {size}; "
                "is this a checkpoint of another model?"
            )
        return tensor


def reshape_moments(moments: dict[str, torch.Tensor], like: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return moments in the shape and on the device of their tensor. Fused AdamW needs its step count there as well."""
    return {
        kind: value.to(like.device, copy=True).reshape(() if kind == "step" else like.shape)
        for kind, value in moments.items()
    }


def _plain(value: torch.Tensor) -> torch.Tensor:
    """Return a flat copy on the CPU that shares no memory, as safetensors requires."""
    return value.detach().reshape(-1).to("cpu", copy=True)
