"""The formats of weights.quantization, and folders whose matrices of layers are in one of them.

Only these matrices are quantized, in 4 bits only those of routed experts. Norms, embeddings, the output layer and
routers keep their dtype.
Tests: tests/unit/tensors/test_quantized_model.py.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from asyncrl.durable_files import sync
from asyncrl.tensors import fp8, int4, weight_files
from asyncrl.tensors.adapter_names import module_name
from asyncrl.tensors.model_tensors import Shapes

Tensors = Iterable[tuple[str, torch.Tensor]]


FORMATS: Final = ("fp8", fp8.ROUND, *int4.GROUPS)
"""Values of weights.quantization."""
_NAME_LENGTH: Final = 12
"""Digits of a model's fingerprint in the name of its folder."""


def quantize_tensors(tensors: Tensors, quantization: str) -> Tensors:
    """Yield ``tensors`` in that format; unchanged for an empty one."""
    if quantization in int4.GROUPS:
        return int4.quantize_experts(tensors, group=int4.GROUPS[quantization])
    return fp8.quantize_tensors(tensors, quantization) if quantization else tensors


def config(quantization: str) -> dict[str, Any]:
    """Return the quantization_config of a folder in that format."""
    if quantization in int4.GROUPS:
        return int4.config([int4.ALL_BUT_EXPERTS], group=int4.GROUPS[quantization])
    return fp8.config(quantization)


def count_bytes(shapes: Shapes, quantization: str, *, width: int) -> int:
    """Return the bytes of tensors in that format.  width: of a number that is not quantized"""
    return sum(_bytes_of(name, shape, quantization, width=width) for name, shape in shapes.items())


def _bytes_of(name: str, shape: tuple[int, ...], quantization: str, *, width: int) -> int:
    numbers = math.prod(shape)
    if not quantization or not module_name(name) or len(shape) != 2:
        return width * numbers
    if quantization not in int4.GROUPS:
        return numbers + 4 * math.prod(-(-size // fp8.BLOCK) for size in shape)
    return numbers // 2 + 2 * numbers // int4.GROUPS[quantization] if int4.is_of_experts(name) else width * numbers


def are_quantized(names: Iterable[str]) -> bool:
    """Whether tensors with these names are in a format of weights.quantization."""
    return any(_is_beside(name) for name in names)


def _is_beside(name: str) -> bool:
    return fp8.is_scale(name) or int4.is_beside(name)


def find_scale(model: Path) -> str:
    """Return the name of a scale of quantized weights in a folder; empty if there is none. Raises WeightsError."""
    for file in weight_files.paths(model):
        with safe_open(os.fspath(file), framework="pt") as stored:
            names: list[str] = stored.keys()
        if found := [name for name in names if _is_beside(name)]:
            return found[0]
    return ""


def model_folder(model: Path, into: Path, quantization: str) -> Path:
    """Quantize the model into a folder whose name begins as ``into``, unless that was done before. Returns the folder.

    Its name ends in the fingerprint of the model, so that another model has another folder. Several processes may call
    this at once: one writes it, and the others wait. Raises OSError, ValueError, WeightsError.
    """
    made = into.with_name(f"{into.name}-{weight_files.fingerprint(model)[:_NAME_LENGTH]}")
    into.parent.mkdir(parents=True, exist_ok=True)
    temporary = into.with_name(f".{into.name}.tmp")
    with into.with_name(f".{into.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the process that writes is done, or dead
        if made.exists():
            return made
        shutil.rmtree(temporary, ignore_errors=True)  # what a killed process left
        temporary.mkdir()
        try:
            quantize = partial(quantize_tensors, quantization=quantization)
            write_folder(model, temporary, quantize, lambda _: config(quantization))
            sync(*temporary.iterdir(), temporary)
            temporary.rename(made)
            sync(into.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return made


def write_folder(
    model: Path, folder: Path, quantize: Callable[[Tensors], Tensors], describe: Callable[[list[str]], dict[str, Any]]
) -> None:
    """Write the model in the Hugging Face folder ``model`` to ``folder``, with what ``quantize`` makes of its tensors.

    describe: returns the quantization_config, from the linear modules whose matrices are not quantized

    One weight file is in memory at a time. Raises OSError, ValueError, WeightsError.
    """
    index: dict[str, str] = {}
    kept: list[str] = []
    files = weight_files.paths(model)  # a folder may hold the weights a second time, as consolidated.safetensors
    for file in files:
        made = dict(quantize(_tensors(file)))
        save_file(made, folder / file.name, metadata={"format": "pt"})
        index |= dict.fromkeys(made, file.name)
        kept += [name for name, one in made.items() if one.ndim == 2 and _is_linear(name)]
    for file in sorted(model.iterdir()):
        if file.is_file() and not weight_files.is_weight_file(file.name):
            shutil.copyfile(file, folder / file.name)
    if files[0].name != weight_files.WEIGHTS_FILE:
        text = json.dumps({"metadata": {}, "weight_map": index})
        (folder / weight_files.INDEX_FILE).write_text(text)
    about = describe([name.removesuffix(".weight") for name in kept])
    weight_files.describe(folder, {"quantization_config": about})


def _is_linear(name: str) -> bool:
    return name.endswith(".weight") and "embed" not in name


def _tensors(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(os.fspath(file), framework="pt") as stored:
        for name in stored.keys():  # noqa: SIM118 (safe_open is no mapping)
            yield name, stored.get_tensor(name)
