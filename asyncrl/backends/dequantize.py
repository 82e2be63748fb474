"""Converts a Hugging Face folder with 8-bit or 4-bit matrices to bfloat16.

DeepSeek-V3, Kimi-K2 and Qwen's FP8 models are published with such matrices, and runs with weights.quantization keep
such models. The new folder gets the model type that transformers reads without the model's own code. One matrix is in
memory at a time.
Test: tests/unit/backends/test_dequantize.py.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from asyncrl.backends.huggingface import SAME_ARCHITECTURE, open_weights
from asyncrl.errors import ConfigError
from asyncrl.tensors import fp8, int4, safetensors_file
from asyncrl.tensors.snapshot import TensorEntry

_INDEX: Final = "model.safetensors.index.json"
_OF_OWN_CODE: Final = ("auto_map", "quantization_config")
Read = Callable[[str], torch.Tensor]
"""Returns a tensor of the folder by its name."""


def is_needed(config: dict[str, Any]) -> bool:
    """Return whether a model with this config.json must be converted by ``to_bfloat16`` before training."""
    return bool(config.get("quantization_config")) or config.get("model_type") in SAME_ARCHITECTURE


def to_bfloat16(source: Path, destination: Path, *, note: Callable[[str], None]) -> int:
    """Write config.json and weights to the folder ``destination``. Returns the number of parameters.

    note  called with the name of each weight file after it is written

    Raises ConfigError, also for scales that are missing or do not fit their matrix.
    """
    config = json.loads((source / "config.json").read_text())
    kind = _format(source, config)
    num_parameters, weight_map = 0, dict[str, str]()
    with open_weights(source, where=str(source)) as read:
        for file in _weight_files(source):
            try:
                with file.open("rb") as stream:
                    stored, _ = safetensors_file.entries_of(stream)
                matrices = [(whole, entry) for entry in stored if (whole := kind.whole(entry)) is not None]
                with (destination / file.name).open("wb") as stream:
                    safetensors_file.write(stream, _blocks(matrices, kind, read))
            except ValueError as error:
                raise ConfigError(f"{file}: {error}") from None
            num_parameters += sum(torch.Size(whole.shape).numel() for whole, _ in matrices)
            weight_map |= {whole.name: file.name for whole, _ in matrices}
            note(file.name)
    if (source / _INDEX).is_file():
        (destination / _INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=1))
    kept = {key: value for key, value in config.items() if key not in _OF_OWN_CODE}
    model_type = SAME_ARCHITECTURE.get(config.get("model_type", ""), config.get("model_type"))
    (destination / "config.json").write_text(json.dumps(kept | {"model_type": model_type}, indent=2))
    return num_parameters


def _weight_files(source: Path) -> list[Path]:
    if (source / _INDEX).is_file():
        names: set[str] = set(json.loads((source / _INDEX).read_text())["weight_map"].values())
        return [source / name for name in sorted(names)]
    return [source / "model.safetensors"]


@dataclass(frozen=True, slots=True)
class _FP8:
    """Matrices in e4m3. ``block``: rows and columns that share a scale"""

    block: tuple[int, int]

    def whole(self, entry: TensorEntry) -> TensorEntry | None:
        """Return the entry in the new folder; None for scales."""
        if fp8.is_scale(entry.name):
            return None
        return dataclasses.replace(entry, dtype=torch.bfloat16) if entry.dtype == torch.float8_e4m3fn else entry

    def read(self, entry: TensorEntry, read: Read) -> torch.Tensor:
        """Return the tensor of the new folder. Raises ValueError for scales that do not fit."""
        tensor = read(entry.name)
        if tensor.dtype != torch.float8_e4m3fn:
            return tensor
        return fp8.dequantize(tensor, read(fp8.scale_of(entry.name)), block=self.block)


@dataclass(frozen=True, slots=True)
class _INT4:
    """Packed matrices. ``group``: inputs that share a scale"""

    group: int

    def whole(self, entry: TensorEntry) -> TensorEntry | None:
        """See _FP8."""
        if entry.name.endswith((".weight_scale", ".weight_shape")):
            return None
        if not entry.name.endswith(int4.PACKED):
            return entry
        rows, words = entry.shape
        name = entry.name.removesuffix(int4.PACKED)
        return TensorEntry(name=name, dtype=torch.bfloat16, shape=(rows, words * int4.IN_A_WORD))

    def read(self, entry: TensorEntry, read: Read) -> torch.Tensor:
        """See _FP8."""
        tensor = read(entry.name)
        if not entry.name.endswith(int4.PACKED):
            return tensor
        scale = read(entry.name.removesuffix(int4.PACKED) + "_scale")
        return int4.dequantize(tensor, scale, group=self.group)


def _format(source: Path, config: dict[str, Any]) -> _FP8 | _INT4:
    """Return how the folder's matrices are quantized. Raises ConfigError for other kinds of quantization."""
    about = config.get("quantization_config")
    if not about:
        return _FP8((fp8.BLOCK, fp8.BLOCK))
    table = about if isinstance(about, dict) else {"quant_method": about}
    method, size = table.get("quant_method"), table.get("weight_block_size")
    if method == "fp8" and isinstance(size, list) and len(size) == 2 and all(map(_is_size, size)):
        return _FP8((size[0], size[1]))
    if method == int4.CONFIG["quant_method"] and (group := int4.group_of(table)):
        return _INT4(group)
    raise ConfigError(
        f"{source}: its weights are quantized ({method}, weight_block_size {size}); only FP8 in blocks and symmetric "
        "INT4 in groups can be read; use the unquantized model"
    )


def _is_size(number: Any) -> bool:
    return type(number) is int and number > 0


def _blocks(
    matrices: Sequence[tuple[TensorEntry, TensorEntry]], kind: _FP8 | _INT4, read: Read
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file. ``matrices``: entries of the new folder, and of the old one"""
    yield safetensors_file.header([whole for whole, _ in matrices])
    for whole, entry in matrices:
        try:
            tensor = kind.read(entry, read)
        except ValueError as error:
            raise ValueError(f"{whole.name}: {error}") from None
        yield tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
