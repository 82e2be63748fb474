"""Converts a Hugging Face folder as it is published to one that can be trained (`asyncrl import-model FOLDER
NEW_FOLDER`): 8-bit or 4-bit matrices to bfloat16, and other names for what transformers does not read as text model.

DeepSeek-V3, Kimi-K2 and Qwen's FP8 models are published with 8-bit matrices, gpt-oss with 4-bit experts (MXFP4),
Kimi-K2-Thinking with 4-bit experts of compressed-tensors, and runs with weights.quantization keep 8-bit models. The new
folder has the model type that transformers reads without the model's own code, or the text part of a model that reads
images, too (backends/published.py). One tensor is in memory at a time.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from tqdm import tqdm

from asyncrl.backends.huggingface import open_weights, read_shape
from asyncrl.backends.published import AS_IT_IS, PUBLISHED, Published, partial_rotary_factor
from asyncrl.contrib.importers import mxfp4
from asyncrl.data.model_folder import check_model, copy_all_but_weights, new_folder, read_if_valid
from asyncrl.errors import ConfigError
from asyncrl.tensors import fp8, int4, safetensors_file
from asyncrl.tensors.snapshot import TensorEntry

_INDEX: Final = "model.safetensors.index.json"
_OF_OWN_CODE: Final = ("auto_map", "quantization_config")
Read = Callable[[str], torch.Tensor]
"""Returns a tensor of the folder by its name."""

logger = logging.getLogger(__name__)


def import_folder(source: Path, destination: Path) -> int:
    """Write the model in ``source`` to ``destination`` in bfloat16 and return its number of parameters.

    Raises ConfigError for weights quantized in another way, a model that is not supported or needs no import, and a
    destination that exists.
    """
    if not _published(source).part:  # else the new folder alone is one of a text model
        check_model(source)
    if not is_needed(json.loads((source / "config.json").read_text())):
        raise ConfigError(
            f"{source}: its weights are not quantized, so there is nothing to import; name it as model.path"
        )
    with new_folder(destination) as folder, tqdm(desc="weights", unit="file", disable=None) as progress:
        copy_all_but_weights(source, folder)
        num_parameters = to_bfloat16(source, folder, note=lambda name: progress.update())
        check_model(folder)
        read_shape(folder, where=str(destination))
    logger.info("%s: %s parameters in bfloat16", destination, f"{num_parameters:,}")
    return num_parameters


def is_needed(config: dict[str, Any]) -> bool:
    """Return whether a model with this config.json must be converted by ``to_bfloat16`` before training."""
    is_of_other_names = config.get("model_type") in PUBLISHED or bool(partial_rotary_factor(config))
    return bool(config.get("quantization_config")) or is_of_other_names


def _published(source: Path) -> Published:
    """Return what the folder becomes. A folder whose config.json cannot be read is refused elsewhere."""
    return PUBLISHED.get(read_if_valid(source / "config.json").get("model_type", ""), AS_IT_IS)


def to_bfloat16(source: Path, destination: Path, *, note: Callable[[str], None]) -> int:
    """Write config.json and weights to the folder ``destination``. Returns the number of parameters.

    note  called with the name of each weight file after it is written

    Raises ConfigError, also for scales that are missing or do not fit their matrix.
    """
    config = json.loads((source / "config.json").read_text())
    kind, published = _kind(source, config), _published(source)
    num_parameters, weight_map = 0, dict[str, str]()
    with open_weights(source, where=str(source)) as read:
        for file in _weight_files(source):
            try:
                with file.open("rb") as stream:
                    stored, _ = safetensors_file.read_header(stream)
                wholes = [(whole, entry) for entry in stored if (whole := kind.whole(entry)) is not None]
                matrices = [(made, entry) for whole, entry in wholes if (made := list(published.tensors(whole)))]
                with (destination / file.name).open("wb") as stream:
                    safetensors_file.write(stream, _blocks(matrices, kind, read))
            except ValueError as error:
                raise ConfigError(f"{file}: {error}") from None
            made_here = [one for made, _ in matrices for one in made]
            num_parameters += sum(torch.Size(one.shape).numel() for one in made_here)
            weight_map |= {one.name: file.name for one in made_here}
            note(file.name)
    if (source / _INDEX).is_file():
        (destination / _INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=1))
    kept = {key: value for key, value in published.config(config).items() if key not in _OF_OWN_CODE}
    dtype = {} if kept.get("dtype") or kept.get("torch_dtype") else {"torch_dtype": "bfloat16"}  # gpt-oss names none
    (destination / "config.json").write_text(json.dumps(kept | partial_rotary_factor(kept) | dtype, indent=2))
    return num_parameters


def _weight_files(source: Path) -> list[Path]:
    if (source / _INDEX).is_file():
        names: set[str] = set(json.loads((source / _INDEX).read_text())["weight_map"].values())
        return [source / name for name in sorted(names)]
    return [source / "model.safetensors"]


class _Kind(Protocol):
    """How a folder's weights are quantized."""

    def whole(self, entry: TensorEntry) -> TensorEntry | None:
        """Return the entry in the new folder; None for scales. Raises ValueError for an impossible shape."""

    def read(self, entry: TensorEntry, read: Read) -> torch.Tensor:
        """Return the tensor of ``whole(entry)``. Raises ValueError for scales that do not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fp8:
    """Matrices in e4m3.  block: the rows and columns that share a scale"""

    block: tuple[int, int]

    def whole(self, entry: TensorEntry) -> TensorEntry | None:
        if fp8.is_scale(entry.name):
            return None
        return dataclasses.replace(entry, dtype=torch.bfloat16) if entry.dtype == torch.float8_e4m3fn else entry

    def read(self, entry: TensorEntry, read: Read) -> torch.Tensor:
        tensor = read(entry.name)
        if tensor.dtype != torch.float8_e4m3fn:
            return tensor
        return fp8.dequantize(tensor, read(fp8.scale_name(entry.name)), block=self.block)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mxfp4:
    """Experts in 4 bits."""

    def whole(self, entry: TensorEntry) -> TensorEntry | None:
        if mxfp4.is_scale(entry.name):
            return None
        if not mxfp4.is_quantized(entry.name):
            return entry
        shape = mxfp4.whole_shape(entry.shape)
        return TensorEntry(name=mxfp4.whole_of(entry.name), dtype=torch.bfloat16, shape=shape)

    def read(self, entry: TensorEntry, read: Read) -> torch.Tensor:
        if not mxfp4.is_quantized(entry.name):
            return read(entry.name)
        return mxfp4.dequantize(read(entry.name), read(mxfp4.scale_of(entry.name)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Int4:
    """Matrices in 4 bits, as compressed-tensors packs them."""

    def whole(self, entry: TensorEntry) -> TensorEntry | None:
        if int4.is_beside(entry.name):
            return None
        if not int4.is_packed(entry.name):
            return entry
        rows, words = entry.shape
        return TensorEntry(name=int4.whole_name(entry.name), dtype=torch.bfloat16, shape=(rows, words * int4.IN_INT32))

    def read(self, entry: TensorEntry, read: Read) -> torch.Tensor:
        if not int4.is_packed(entry.name):
            return read(entry.name)
        packed, scale, shape = map(read, int4.names(int4.whole_name(entry.name)))
        if shape.tolist() != [len(packed), packed.shape[1] * int4.IN_INT32]:
            raise ValueError(f"packed as {list(packed.shape)}, it cannot be {shape.tolist()}")
        return int4.dequantize(packed, scale, columns=int(shape[1]))


def _kind(source: Path, config: dict[str, Any]) -> _Kind:
    """Return how the weights are quantized. Raises ConfigError for kinds that cannot be read."""
    about = config.get("quantization_config")
    if not about:
        return _Fp8(block=(fp8.BLOCK, fp8.BLOCK))
    table = about if isinstance(about, dict) else {"quant_method": about}
    method, size = table.get("quant_method"), table.get("weight_block_size")
    if method == "mxfp4":
        return _Mxfp4()
    if method == "compressed-tensors" and _is_packed_int4(table):
        return _Int4()
    if method == "fp8" and isinstance(size, list) and len(size) == 2 and all(map(_is_size, size)):
        return _Fp8(block=(size[0], size[1]))
    raise ConfigError(
        f"{source}: its weights are quantized ({method}, weight_block_size {size}); only FP8 in blocks, "
        "MXFP4, and symmetric INT4 of compressed-tensors can be read; use the unquantized model"
    )


def _is_packed_int4(table: dict[str, Any]) -> bool:
    """Return whether all quantized matrices are symmetric integers of 4 bits, packed."""
    groups = table.get("config_groups")
    if table.get("format") != "pack-quantized" or not isinstance(groups, dict):
        return False
    weights = [group.get("weights") if isinstance(group, dict) else None for group in groups.values()]
    return all(
        isinstance(one, dict)
        and (one.get("num_bits"), one.get("type"), one.get("symmetric")) == (4, "int", True)
        and not one.get("actorder")
        for one in weights
    )


def _is_size(number: Any) -> bool:
    return type(number) is int and number > 0


def _blocks(
    matrices: Sequence[tuple[Sequence[TensorEntry], TensorEntry]], kind: _Kind, read: Read
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file.  matrices: entries of the new folder, and the one of the old folder whose
    bytes they share"""
    yield safetensors_file.header([one for made, _ in matrices for one in made])
    for _made, entry in matrices:
        try:
            tensor = kind.read(entry, read)
        except ValueError as error:
            raise ValueError(f"{entry.name}: {error}") from None
        yield tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
