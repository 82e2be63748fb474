"""Converts a Hugging Face folder with 8-bit matrices to bfloat16.

DeepSeek-V3, Kimi-K2 and Qwen's FP8 models are published with such matrices. The new folder gets the model type that
transformers reads without the model's own code. One matrix is in memory at a time.
Test: tests/unit/backends/test_dequantize.py.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from asyncrl.backends.huggingface import SAME_ARCHITECTURE, open_weights
from asyncrl.errors import ConfigError
from asyncrl.tensors import fp8, safetensors_file
from asyncrl.tensors.snapshot import TensorEntry

_INDEX: Final = "model.safetensors.index.json"
_OF_OWN_CODE: Final = ("auto_map", "quantization_config")


def is_needed(config: dict[str, Any]) -> bool:
    """Return whether a model with this config.json must be converted by ``to_bfloat16`` before training."""
    return bool(config.get("quantization_config")) or config.get("model_type") in SAME_ARCHITECTURE


def to_bfloat16(source: Path, destination: Path, *, note: Callable[[str], None]) -> int:
    """Write config.json and weights to the folder ``destination``. Returns the number of parameters.

    note  called with the name of each weight file after it is written

    Raises ConfigError, also for scales that are missing or do not fit their matrix.
    """
    config = json.loads((source / "config.json").read_text())
    block = _block_size(source, config)
    num_parameters, weight_map = 0, dict[str, str]()
    with open_weights(source, where=str(source)) as read:
        for file in _weight_files(source):
            try:
                with file.open("rb") as stream:
                    stored, _ = safetensors_file.entries_of(stream)
                entries = [_whole(entry) for entry in stored if not fp8.is_scale(entry.name)]
                with (destination / file.name).open("wb") as stream:
                    safetensors_file.write(stream, _blocks(entries, read, block))
            except ValueError as error:
                raise ConfigError(f"{file}: {error}") from None
            num_parameters += sum(torch.Size(entry.shape).numel() for entry in entries)
            weight_map |= {entry.name: file.name for entry in entries}
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


def _block_size(source: Path, config: dict[str, Any]) -> tuple[int, int]:
    """Return the rows and columns that share a scale. Raises ConfigError for other kinds of quantization."""
    about = config.get("quantization_config")
    if not about:
        return (fp8.BLOCK, fp8.BLOCK)
    table = about if isinstance(about, dict) else {"quant_method": about}
    method, size = table.get("quant_method"), table.get("weight_block_size")
    if method == "fp8" and isinstance(size, list) and len(size) == 2 and all(map(_is_size, size)):
        return (size[0], size[1])
    raise ConfigError(
        f"{source}: its weights are quantized ({method}, weight_block_size {size}); only FP8 in blocks can be "
        "read; use the unquantized model"
    )


def _is_size(number: Any) -> bool:
    return type(number) is int and number > 0


def _whole(entry: TensorEntry) -> TensorEntry:
    return dataclasses.replace(entry, dtype=torch.bfloat16) if entry.dtype == torch.float8_e4m3fn else entry


def _blocks(
    entries: Sequence[TensorEntry], read: Callable[[str], torch.Tensor], block: tuple[int, int]
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file."""
    yield safetensors_file.header(entries)
    for entry in entries:
        tensor = read(entry.name)
        if tensor.dtype == torch.float8_e4m3fn:
            scale = read(fp8.scale_of(entry.name))
            try:
                tensor = fp8.dequantize(tensor, scale, block=block)
            except ValueError as error:
                raise ValueError(f"{entry.name}: {error}") from None
        yield tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
