"""Converts a Hugging Face folder with 8-bit or 4-bit matrices to bfloat16.

DeepSeek-V3, Kimi-K2 and Qwen's FP8 models are published with 8-bit matrices, gpt-oss with 4-bit experts (MXFP4). The
new folder gets the model type that transformers reads without the model's own code. One matrix is in memory at a time,
or one tensor with a layer's 4-bit experts.
Test: tests/unit/backends/test_dequantize.py.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from asyncrl.backends.huggingface import SAME_ARCHITECTURE, open_weights
from asyncrl.errors import ConfigError
from asyncrl.tensors import fp8, mxfp4, safetensors_file
from asyncrl.tensors.snapshot import TensorEntry

_INDEX: Final = "model.safetensors.index.json"
_OF_OWN_CODE: Final = ("auto_map", "quantization_config")
_Read = Callable[[str], torch.Tensor]


def is_needed(config: dict[str, Any]) -> bool:
    """Return whether a model with this config.json must be converted by ``to_bfloat16`` before training."""
    return bool(config.get("quantization_config")) or config.get("model_type") in SAME_ARCHITECTURE


def to_bfloat16(source: Path, destination: Path, *, note: Callable[[str], None]) -> int:
    """Write config.json and weights to the folder ``destination``. Returns the number of parameters.

    note  called with the name of each weight file after it is written

    Raises ConfigError, also for scales that are missing or do not fit their matrix.
    """
    config = json.loads((source / "config.json").read_text())
    kind = _kind(source, config)
    num_parameters, weight_map = 0, dict[str, str]()
    with open_weights(source, where=str(source)) as read:
        for file in _weight_files(source):
            try:
                with file.open("rb") as stream:
                    stored, _ = safetensors_file.entries_of(stream)
                found = [entry for entry in stored if not kind.is_scale(entry.name)]
                entries = [kind.whole(entry) for entry in found]
                with (destination / file.name).open("wb") as stream:
                    safetensors_file.write(stream, _blocks(found, entries, read, kind))
            except ValueError as error:
                raise ConfigError(f"{file}: {error}") from None
            num_parameters += sum(torch.Size(entry.shape).numel() for entry in entries)
            weight_map |= {entry.name: file.name for entry in entries}
            note(file.name)
    if (source / _INDEX).is_file():
        (destination / _INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=1))
    kept = {key: value for key, value in config.items() if key not in _OF_OWN_CODE}
    model_type = SAME_ARCHITECTURE.get(config.get("model_type", ""), config.get("model_type"))
    dtype = {} if kept.get("dtype") or kept.get("torch_dtype") else {"torch_dtype": "bfloat16"}  # gpt-oss names none
    (destination / "config.json").write_text(json.dumps(kept | {"model_type": model_type, **dtype}, indent=2))
    return num_parameters


def _weight_files(source: Path) -> list[Path]:
    if (source / _INDEX).is_file():
        names: set[str] = set(json.loads((source / _INDEX).read_text())["weight_map"].values())
        return [source / name for name in sorted(names)]
    return [source / "model.safetensors"]


class _Kind(Protocol):
    """How weights are quantized."""

    def is_scale(self, name: str) -> bool:
        """Return whether a tensor holds the scales of another."""

    def whole(self, entry: TensorEntry) -> TensorEntry:
        """Return the entry in bfloat16 of a tensor that is no scale. Raises ValueError for an impossible shape."""

    def read(self, entry: TensorEntry, read: _Read) -> torch.Tensor:
        """Return the tensor of ``whole(entry)``. Raises ValueError for scales of another matrix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fp8:
    """e4m3 matrices.  block: the rows and columns that share a scale"""

    block: tuple[int, int]

    def is_scale(self, name: str) -> bool:
        return fp8.is_scale(name)

    def whole(self, entry: TensorEntry) -> TensorEntry:
        return dataclasses.replace(entry, dtype=torch.bfloat16) if entry.dtype == torch.float8_e4m3fn else entry

    def read(self, entry: TensorEntry, read: _Read) -> torch.Tensor:
        tensor = read(entry.name)
        if tensor.dtype != torch.float8_e4m3fn:
            return tensor
        return fp8.dequantize(tensor, read(fp8.scale_of(entry.name)), block=self.block)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mxfp4:
    """Experts in 4 bits."""

    def is_scale(self, name: str) -> bool:
        return mxfp4.is_scale(name)

    def whole(self, entry: TensorEntry) -> TensorEntry:
        if not mxfp4.is_quantized(entry.name):
            return entry
        shape = mxfp4.whole_shape(entry.shape)
        return TensorEntry(name=mxfp4.whole_of(entry.name), dtype=torch.bfloat16, shape=shape)

    def read(self, entry: TensorEntry, read: _Read) -> torch.Tensor:
        if not mxfp4.is_quantized(entry.name):
            return read(entry.name)
        return mxfp4.dequantize(read(entry.name), read(mxfp4.scale_of(entry.name)))


def _kind(source: Path, config: dict[str, Any]) -> _Kind:
    """Return how the weights are quantized. Raises ConfigError for kinds that cannot be read."""
    about = config.get("quantization_config")
    if not about:
        return _Fp8(block=(fp8.BLOCK, fp8.BLOCK))
    table = about if isinstance(about, dict) else {"quant_method": about}
    method, size = table.get("quant_method"), table.get("weight_block_size")
    if method == "mxfp4":
        return _Mxfp4()
    if method == "fp8" and isinstance(size, list) and len(size) == 2 and all(map(_is_size, size)):
        return _Fp8(block=(size[0], size[1]))
    raise ConfigError(
        f"{source}: its weights are quantized ({method}, weight_block_size {size}); only FP8 in blocks and MXFP4 can "
        "be read; use the unquantized model"
    )


def _is_size(number: Any) -> bool:
    return type(number) is int and number > 0


def _blocks(
    stored: Sequence[TensorEntry], entries: Sequence[TensorEntry], read: _Read, kind: _Kind
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file with ``entries``, made of the tensors ``stored``."""
    yield safetensors_file.header(entries)
    for entry in stored:
        try:
            tensor = kind.read(entry, read)
        except ValueError as error:
            raise ValueError(f"{entry.name}: {error}") from None
        yield tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
