"""Converts a Hugging Face model folder to a Megatron checkpoint and back (`asyncrl convert SRC DST`).

    DST                                  DST, from a Hugging Face folder
      config.json, tokenizer.json, ...     latest_checkpointed_iteration.txt   "release", for Megatron
      model.safetensors                    release/                            the distributed checkpoint
                                           huggingface/                        the source without its weights

The destination is created completely or not at all.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Final

from asyncrl.actors.learner import checkpoint, manifest
from asyncrl.backends import conversion
from asyncrl.backends.conversion import Converted
from asyncrl.backends.reference.models import STATE_FILE
from asyncrl.data.model_folder import check_weights, copy_all_but_weights, new_folder
from asyncrl.errors import CheckpointError, ConfigError

_LATEST: Final = "latest_checkpointed_iteration.txt"
_WITHOUT_WEIGHTS: Final = "huggingface"


def convert(source: Path, destination: Path, *, model: Path | None = None) -> Converted:
    """Convert ``source`` to the other format. model: folder with the config.json of the checkpoint's model

    Raises ConfigError if ``source`` has neither format, the model is not supported, its config.json does not fit the
    weights, the checkpoint is damaged, or the destination exists.
    """
    if os.path.lexists(destination):
        raise ConfigError(f"{destination}: exists; name a folder that does not")
    if not destination.absolute().parent.is_dir():
        raise ConfigError(f"{destination.parent}: is not a folder; make it first")
    saved = _find_checkpoint(source)
    if saved is None and model is not None:
        raise ConfigError(f"--model: {source} is a Hugging Face folder, which has its own config.json; remove it")
    if model is not None and not (model / "config.json").is_file():  # transformers would ask the hub for it
        raise ConfigError(f"--model: {model}: no config.json there, so no Hugging Face model folder")
    try:
        with new_folder(destination) as folder:
            if saved is None:
                check_weights(source)
                (folder / "release").mkdir()
                done = conversion.to_megatron(source, folder / "release")
                (folder / _LATEST).write_text("release")
                copy_all_but_weights(source, folder / _WITHOUT_WEIGHTS)
            else:
                model = model or _model_folder(source)
                check = functools.partial(check_weights, model)
                done = conversion.to_huggingface(saved, folder, model=model, check=check)
                copy_all_but_weights(model, folder)
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    except OSError as error:
        raise ConfigError(f"{source} to {destination}: {error}") from error
    return done


def _find_checkpoint(source: Path) -> Path | None:
    """Return the distributed checkpoint at or in ``source``; None for a Hugging Face folder. Raises ConfigError."""
    if (source / _LATEST).is_file():
        try:
            text = (source / _LATEST).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{source / _LATEST}: cannot be read: {error}") from error
        source = source / (f"iter_{int(text):07d}" if text.isdigit() else text)
        if not source.is_dir():
            raise ConfigError(f"{source}: is not there, but {source.parent / _LATEST} names it")
    for folder in (source, source / "backend"):
        if conversion.is_checkpoint(folder):
            if (folder.parent / manifest.FILE).is_file() and (problem := _describe_damage(folder)):
                raise ConfigError(f"{folder.parent}: is damaged: {problem}; convert another checkpoint of the run")
            return folder
    if (source / "config.json").is_file():
        return None
    if any((folder / STATE_FILE).is_file() for folder in (source, source / "backend")):
        raise ConfigError(f"{source}: is a checkpoint of the reference backend, which convert does not read")
    if steps := checkpoint.list_complete(source) or checkpoint.list_complete(source / "checkpoints"):
        raise ConfigError(f"{source}: has checkpoints of a run; name one of them, such as the newest, {steps[-1]}")
    raise ConfigError(
        f"{source}: is neither a Hugging Face model folder (config.json) nor a distributed checkpoint of Megatron's "
        f"(.metadata or {_LATEST}), nor a checkpoint of a run with the megatron backend"
    )


def _describe_damage(saved: Path) -> str:
    """Describe what is wrong with the files of a run's checkpoint; the tensors have sums of their own."""
    return manifest.find_damage(saved.parent, only=f"{saved.name}/{conversion.METADATA}")


def _model_folder(source: Path) -> Path:
    folder = source / _WITHOUT_WEIGHTS
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{source}: does not say which model it is of; --model FOLDER names a Hugging Face folder of the same model"
        )
    return folder
