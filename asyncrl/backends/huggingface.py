"""Reads shape and weights from a Hugging Face folder without transformers' model code."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open

from asyncrl.backends.families.family import Family, Unsupported
from asyncrl.backends.families.shape import ModelShape
from asyncrl.backends.families.table import FAMILIES
from asyncrl.backends.published import PUBLISHED
from asyncrl.config import plugins
from asyncrl.config.adapter import RunConfig
from asyncrl.data.model_folder import read_if_valid
from asyncrl.errors import ConfigError

_OUTPUT: Final = "lm_head.weight"


def load_family(name: str) -> Family | None:
    """Return the family that model.family names; None if it is empty. Raises ConfigError."""
    if not name:
        return None
    family: Family = plugins.load(name, where="model.family", kind=Family)
    return family


def policy_shape(run: RunConfig) -> ModelShape:
    """Return the shape of the run's own model, before training. See ``read_shape``."""
    return read_shape(Path(run.model.path), own=load_family(run.model.family))


def read_shape(folder: Path, *, where: str = "model.path", own: Family | None = None) -> ModelShape:
    """Return the shape of the model in ``folder``; ``where`` is the run file's key for the folder.

    own: the family of model.family, which comes before those of asyncrl

    Raises ConfigError if the architecture is in no family or has unsupported features.
    """
    config = _read_config(folder, where)
    architecture = (config.architectures or [f"unnamed architecture of type {config.model_type}"])[0]
    families = {**FAMILIES, **({own.architecture: own} if own else {})}
    if (family := families.get(architecture)) is None:
        raise ConfigError(
            f"{where}: {folder} holds a {architecture}; the megatron backend supports {', '.join(families)}; others "
            "need model.family"
        )
    try:
        for key, supported in family.only.items():  # others would be silently ignored
            if (value := _read_key(config, key, supported[0])) not in supported:
                raise Unsupported(f"{key} = {value!r}")
        made = family.shape(config)
        if not isinstance(made, ModelShape):
            raise TypeError(f"the family's shape returned {plugins.with_article(type(made))}, not a ModelShape")
        shape = dataclasses.replace(made, family=family)
        _refuse_sizes(shape)
        return shape
    except Unsupported as error:
        raise ConfigError(
            f"{where}: {folder}: the megatron backend does not support {architecture} with {error}"
        ) from None
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:  # a value has another type
        raise ConfigError(
            f"{where}: {folder / 'config.json'} does not describe a {architecture}: {type(error).__name__}: {error}"
        ) from error


def _read_key(config: Any, key: str, default: object) -> Any:
    """Return a key of config.json, or of the decoder's part of it where a model has a vision tower."""
    return getattr(config, key, getattr(getattr(config, "text_config", None), key, default))


def _read_config(folder: Path, where: str) -> Any:
    """Load the model's config with transformers. Raises ConfigError."""
    from transformers import AutoConfig

    _refuse_unreadable(folder, where)
    try:
        return AutoConfig.from_pretrained(folder)
    except Exception as error:  # transformers raises many types for a bad config.json
        reason = str(error).strip().splitlines()
        raise ConfigError(
            f"{where}: {folder} is not a Hugging Face model folder: {type(error).__name__}: {' '.join(reason[:2])}"
        ) from error


def _refuse_unreadable(folder: Path, where: str) -> None:
    """Raise ConfigError for a folder that must be converted by `asyncrl import-model` before training."""
    settings = read_if_valid(folder / "config.json")  # transformers reports what is wrong with the file
    model_type, quantized = settings.get("model_type", ""), settings.get("quantization_config")
    mend = f"`asyncrl import-model {folder} NEW_FOLDER` writes one that can be trained"
    if quantized:
        method = quantized.get("quant_method")
        raise ConfigError(f"{where}: {folder} holds quantized weights (quantization_config: {method}); {mend}")
    if model_type in PUBLISHED and (why := PUBLISHED[model_type].why):
        raise ConfigError(f"{where}: {folder} {why}; {mend}")


def _refuse_sizes(shape: ModelShape) -> None:
    """Raise Unsupported for sizes that do not fit together."""
    heads, keys = shape.num_heads, shape.num_key_value_heads
    if not shape.latent and heads % keys:
        raise Unsupported(f"num_attention_heads = {heads}, no multiple of num_key_value_heads = {keys}")
    if not shape.latent and shape.head_size % 2:
        raise Unsupported(f"heads of odd size, {shape.head_size}")
    if shape.experts is None:
        return
    chosen, number, groups = shape.experts.experts_per_token, shape.experts.num_experts, shape.experts.num_groups
    if chosen > number:
        raise Unsupported(f"num_experts_per_tok = {chosen} of {number} experts")
    if groups > 1 and (number % groups or number // groups < 2):
        raise Unsupported(f"n_group = {groups} groups of {number} experts")


def weight_names(folder: Path) -> list[str]:
    """Return the names of the tensors that ``open_weights`` reads. The files must exist."""
    return list(_files_by_tensor(folder))


def _files_by_tensor(folder: Path) -> dict[str, str]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files: dict[str, str] = json.loads(index.read_text())["weight_map"]
        return files
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return dict.fromkeys(file.keys(), "model.safetensors")


@contextmanager
def open_weights(folder: Path, *, where: str = "model.path") -> Iterator[Callable[[str], torch.Tensor]]:
    """Yield a reader of single tensors from model.safetensors, or from the files in its index. Raises ConfigError."""
    with ExitStack() as stack:
        with _reading(folder, where):
            files_of = _files_by_tensor(folder)
            files = {
                name: stack.enter_context(safe_open(folder / name, framework="pt")) for name in set(files_of.values())
            }

        def read(name: str) -> torch.Tensor:
            if name not in files_of:
                raise ConfigError(f"{where}: {folder} has no weight {name}")
            with _reading(folder, where):
                tensor: torch.Tensor = files[files_of[name]].get_tensor(name)
            return tensor

        yield read


def require_tied(folder: Path, *, embedding: str, where: str = "model.path") -> None:
    """Raise ConfigError if the folder has an output layer of its own although config.json ties it to the embedding.

    Training would ignore that layer, as some engines do and others do not.

    embedding: its name in the folder
    """
    with _reading(folder, where):
        if _OUTPUT not in weight_names(folder):
            return
    with open_weights(folder, where=where) as read:
        if not torch.equal(read(_OUTPUT), read(embedding)):
            raise ConfigError(
                f"{where}: {folder}: {_OUTPUT} differs from {embedding}, but config.json has tie_word_embeddings = "
                "true; set it to false, or remove the tensor"
            )


@contextmanager
def _reading(folder: Path, where: str) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError, json.JSONDecodeError, KeyError) as error:
        raise ConfigError(f"{where}: {folder}: cannot read its safetensors: {error}") from None
