"""The formats of weights.quantization, and folders whose matrices of layers are in one of them.

Only these matrices are quantized. Norms, embeddings, the output layer and routers keep their dtype.
Tests: tests/unit/tensors/test_quantized_model.py.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from asyncrl.tensors import fp8, weight_files

Tensors = Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A format of quantized weights.

    quantize_tensors  replaces each matrix of a layer by the tensors of the format
    config     the quantization_config of config.json
    suffix     end of the name of a tensor that each such matrix has
    block      sizes of matrices, and what a rank of the engine has of them, must be multiples of it
    """

    quantize_tensors: Callable[[Tensors], Iterator[tuple[str, torch.Tensor]]]
    config: Mapping[str, Any]
    suffix: str
    block: int


FORMATS: Final[Mapping[str, Format]] = {
    "fp8": Format(quantize_tensors=fp8.quantize_tensors, config=fp8.CONFIG, suffix=fp8.scale_of(""), block=fp8.BLOCK),
}
"""By the values of weights.quantization."""


_NAME_LENGTH: Final = 12
"""Digits of a model's fingerprint in the name of its folder."""
_LOCK: Final = "lock"
"""File of an unfinished folder, locked by the process that makes it."""


def quantize_tensors(tensors: Tensors, quantization: str) -> Tensors:
    """Yield ``tensors`` in that format; unchanged for an empty one."""
    return FORMATS[quantization].quantize_tensors(tensors) if quantization else tensors


def format_of(names: Iterable[str]) -> str:
    """Return the format of tensors with these names; empty if they are not quantized."""
    for name in names:
        for quantization, one in FORMATS.items():
            if name.endswith(one.suffix):
                return quantization
    return ""


def describe_quantization(config: Path, quantization: str) -> None:
    """Add quantization_config to a config.json, to say that its weights are quantized."""
    settings = json.loads(config.read_text())
    text = json.dumps(settings | {"quantization_config": FORMATS[quantization].config}, indent=2)
    config.unlink()  # it may be a link to the file of another version
    config.write_text(text)


def model_folder(model: Path, into: Path, quantization: str) -> Path:
    """Quantize the model into a folder whose name begins as ``into``, unless that was done before. Returns the folder.

    Its name ends in the fingerprint of the model, so that another model has another folder. Several processes may call
    this at once. Raises OSError, ValueError, WeightsError.
    """
    made = into.with_name(f"{into.name}-{weight_files.fingerprint(model)[:_NAME_LENGTH]}")
    if made.exists():
        return made
    into.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{into.name}-"
    _remove_left(into.parent.glob(f"{prefix}*"))
    temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=into.parent))
    try:
        with (temporary / _LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            _write(model, temporary, quantization)
            _sync(*temporary.iterdir(), temporary)
            try:
                temporary.rename(made)
            except OSError as error:  # another process was first
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            _sync(into.parent)
            (made / _LOCK).unlink(missing_ok=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return made


def _remove_left(folders: Iterable[Path]) -> None:
    """Remove unfinished folders of processes that were killed: nobody holds their locks."""
    for folder in folders:
        with contextlib.suppress(OSError), (folder / _LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)


def _write(model: Path, folder: Path, quantization: str) -> None:
    index: dict[str, str] = {}
    files = weight_files.paths(model)  # a folder may hold the weights a second time, as consolidated.safetensors
    for file in files:
        made = dict(quantize_tensors(_tensors(file), quantization))
        save_file(made, folder / file.name, metadata={"format": "pt"})
        index |= dict.fromkeys(made, file.name)
    for file in sorted(model.iterdir()):
        if file.is_file() and not weight_files.is_of_weights(file.name):
            shutil.copyfile(file, folder / file.name)
    if files[0].name != weight_files.WEIGHTS_FILE:
        text = json.dumps({"metadata": {}, "weight_map": index})
        (folder / weight_files.INDEX_FILE).write_text(text)
    describe_quantization(folder / "config.json", quantization)
    folder.chmod(0o755)


def _sync(*paths: Path) -> None:
    """Sync files, and the entries of folders, to disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _tensors(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(os.fspath(file), framework="pt") as stored:
        for name in stored.keys():  # noqa: SIM118 (safe_open is no mapping)
            yield name, stored.get_tensor(name)
