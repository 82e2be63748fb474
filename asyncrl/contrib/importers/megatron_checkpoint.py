"""Converts a Hugging Face folder to a Megatron checkpoint and back, without ranks or Megatron's code.

    DST                                  DST, from a Hugging Face folder
      config.json, tokenizer.json, ...     latest_checkpointed_iteration.txt   "release", for Megatron
      model.safetensors                    release/                            the distributed checkpoint
                                           huggingface/                        the source without its weights

The destination is created completely or not at all. Parameters are read, converted and written one at a time, experts
individually. So memory holds at most a few copies of the largest parameter: its parts, the whole, and the copy being
written. Values and dtypes are preserved, so a round trip is exact.
Tests: tests/unit/contrib/importers/test_megatron_checkpoint.py.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch

from asyncrl.actors.learner import checkpoint, manifest
from asyncrl.backends import huggingface, weight_cuts, weight_places
from asyncrl.backends.families.shape import ModelShape
from asyncrl.backends.reference import STATE_FILE
from asyncrl.backends.weight_map import Mapping, Part, weight_map
from asyncrl.data.model_folder import check_weights, copy_all_but_weights, new_folder, require_supported
from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.tensors import safetensors_file, torch_dist
from asyncrl.tensors.model_tensors import Shapes
from asyncrl.tensors.snapshot import TensorEntry
from asyncrl.tensors.torch_dist import Chunk, Stored, TorchDist

_LATEST: Final = "latest_checkpointed_iteration.txt"
_WITHOUT_WEIGHTS: Final = "huggingface"
FILE_BYTES: Final = 4 * 2**30
"""Size limit of a safetensors file; a single larger parameter exceeds it."""
_LAYER: Final = re.compile(r"(?:decoder|model)\.layers\.(\d+)\.")
_OF_EVERY_MODEL: Final = ("decoder.layers.", "output_layer.")
"""Beginnings of keys in a checkpoint; its layers may be a dimension of one tensor."""
_NOT_THE_MODEL: Final = ("optimizer.", "asyncrl.", "rng_state", "rerun_state_machine_state")


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """Result of a conversion.

    left_out    tensors of the source that belong to no trained part of the model
    padding     rows of the source's embeddings after the model's vocabulary, also left out
    """

    num_tensors: int
    num_bytes: int
    left_out: tuple[str, ...]
    padding: int = 0


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
                require_supported("SOURCE", source)
                check_weights(source)
                (folder / "release").mkdir()
                done = _to_megatron(source, folder / "release")
                (folder / _LATEST).write_text("release")
                copy_all_but_weights(source, folder / _WITHOUT_WEIGHTS)
            else:
                model = model or _model_folder(source)
                check = functools.partial(check_weights, model)
                done = _to_huggingface(saved, folder, model=model, check=check)
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
        if (folder / torch_dist.METADATA).is_file():
            if (folder.parent / manifest.FILE).is_file() and (
                problem := manifest.find_damage(folder.parent, only=f"{folder.name}/{torch_dist.METADATA}")
            ):  # the tensors have sums of their own
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


def _model_folder(source: Path) -> Path:
    folder = source / _WITHOUT_WEIGHTS
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{source}: does not say which model it is of; --model FOLDER names a Hugging Face folder of the same model"
        )
    return folder


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parameter:
    """A parameter of the whole model, or of one of its experts.  layer: number of its layer; -1 outside layers"""

    entry: Mapping
    layer: int = -1
    expert: int = 0


def _parameters(shape: ModelShape) -> Iterator[_Parameter]:
    """Yield all parameters of the model, layer by layer."""
    for entry in weight_map(shape, part=Part(layers=range(0), experts=range(0))):
        yield _Parameter(entry=entry)
    experts = shape.experts.num_experts if shape.experts else 0
    for layer in range(shape.num_layers):
        for expert in range(max(1, experts)):
            one = Part(
                layers=range(layer, layer + 1),
                experts=range(expert, min(experts, expert + 1)),
                has_embedding=False,
                has_output=False,
            )
            for entry in weight_map(shape, part=one):
                if expert == 0 or (entry.is_of_experts and not entry.is_fused):
                    name = entry.megatron.replace("decoder.layers.0.", f"decoder.layers.{layer}.")
                    yield _Parameter(entry=replace(entry, megatron=name), layer=layer, expert=expert)


def _to_megatron(source: Path, destination: Path) -> Converted:
    """Write the weights in the Hugging Face folder ``source`` to the empty folder ``destination``.

    Raises ConfigError for a model that the megatron backend does not support, CheckpointError, OSError.
    """
    shape = huggingface.read_shape(source, where="source")
    if shape.is_tied:
        huggingface.require_tied(source, embedding=f"{shape.prefix}embed_tokens.weight", where="source")
    used = {name for one in _parameters(shape) for name in one.entry.huggingface}
    left_out = sorted(set(huggingface.weight_names(source)) - used)
    _refuse_layers_of_others(source, (name for name in left_out if not name.endswith("inv_freq")), shape)
    stored: list[Stored] = []
    with huggingface.open_weights(source, where="source") as read:

        def chunks(of: Iterable[_Parameter]) -> Iterator[Chunk]:
            for one in of:
                entry = one.entry
                parts = [read(name) for name in entry.huggingface]
                (whole,) = weight_cuts.fuse(parts, entry.cut, shape, tensor_parallel=1)
                del parts
                place = weight_places.place(
                    entry.megatron, entry.cut, whole.shape, shape, ranks=1, rank=0, first_expert=one.expert
                )
                for view, start in place.views(whole.reshape(-1)):
                    yield Chunk(key=place.key, whole=place.whole, start=start, data=view)

        for number, group in enumerate(_by_layers(_parameters(shape))):
            stored += torch_dist.write_chunks(destination / torch_dist.file_name(0, number), chunks(group))[0]
    torch_dist.complete(destination, stored)
    return Converted(
        num_tensors=len({one.key for one in stored}),
        num_bytes=sum(one.length for one in stored),
        left_out=tuple(left_out),
    )


def _refuse_layers_of_others(source: Path, left_out: Iterable[str], shape: ModelShape) -> None:
    """Raise CheckpointError if a tensor that is left out belongs to the model's own layers or output layer."""
    for name in left_out:
        layer = _LAYER.match(name)
        if (layer and int(layer[1]) < shape.num_layers) or name.startswith(_OF_EVERY_MODEL):
            raise CheckpointError(
                f"{source}: has {name}, which a {shape.architecture} with tie_word_embeddings = "
                f"{str(shape.is_tied).lower()} has not; is config.json another model's?"
            )


def _by_layers(parameters: Iterable[_Parameter]) -> list[list[_Parameter]]:
    found: dict[int, list[_Parameter]] = {}
    for one in parameters:
        found.setdefault(one.layer, []).append(one)
    return list(found.values())


def _to_huggingface(source: Path, destination: Path, *, model: Path, check: Callable[[Shapes], object]) -> Converted:
    """Write a distributed checkpoint's weights as safetensors to the empty folder ``destination``.

    model  a Hugging Face folder with the config.json of that model
    check  called with the shapes of the result before anything is written; may raise

    Raises ConfigError, CheckpointError, OSError.
    """
    shape, saved = huggingface.read_shape(model, where="--model"), TorchDist(source, checks_sums=True)
    parameters = [_StoredParameter.from_checkpoint(one, saved, shape) for one in _parameters(shape)]
    _refuse_further_layers(saved, shape)
    others = (key for key in saved.keys() if not key.startswith(_NOT_THE_MODEL) and "_extra_state" not in key)  # noqa: SIM118
    left_out = sorted(set(others) - {found.key for found in parameters})
    _refuse_layers_of_others(source, left_out, shape)
    check({entry.name: entry.shape for found in parameters for entry in found.entries})
    files = _cut_into_files(parameters)
    names: dict[str, str] = {}
    for number, file in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors" if len(files) > 1 else "model.safetensors"
        with (destination / name).open("wb") as stream:
            safetensors_file.write(stream, _blocks(file, saved, shape))
        names |= {entry.name: name for found in file for entry in found.entries}
    num_bytes = sum(entry.num_bytes for file in files for found in file for entry in found.entries)
    if len(files) > 1:
        index = {"metadata": {"total_size": num_bytes}, "weight_map": names}
        (destination / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    return Converted(
        num_tensors=len(names),
        num_bytes=num_bytes,
        left_out=tuple(left_out),
        padding=max(found.padding for found in parameters),
    )


def _refuse_further_layers(saved: TorchDist, shape: ModelShape) -> None:
    """Raise CheckpointError if the checkpoint has more layers than the model."""
    layers = (_LAYER.match(key) for key in saved.keys())  # noqa: SIM118
    if (last := max((int(found[1]) for found in layers if found), default=0)) >= shape.num_layers:
        raise CheckpointError(
            f"{saved.folder}: has layer {last}, and the model's num_hidden_layers is {shape.num_layers}; is it a "
            "checkpoint of another model?"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredParameter:
    """Where a checkpoint stores a parameter of ``sizes``, and the Hugging Face tensors it becomes.

    padding  rows after the vocabulary, which are not read
    """

    parameter: _Parameter
    key: str
    start: tuple[int, ...]
    sizes: tuple[int, ...]
    entries: tuple[TensorEntry, ...]
    padding: int

    @classmethod
    def from_checkpoint(cls, parameter: _Parameter, saved: TorchDist, shape: ModelShape) -> _StoredParameter:
        """Locate ``parameter`` in the checkpoint. Raises CheckpointError."""
        entry = parameter.entry
        wanted = weight_places.key(entry.megatron)
        same = [wanted, *weight_places.keys_elsewhere(wanted)]
        stacked = [key.replace(f".layers.{parameter.layer}.", ".layers.") for key in same]  # layers as a dimension
        key = next((key for key in [*same, *stacked] if key in saved), None)
        if key is None:
            if any(key.endswith("_adapter.down") for key in saved.keys()):  # noqa: SIM118
                raise CheckpointError(
                    f"{saved.folder}: holds low-rank adapters (learner.lora), not a whole model; published "
                    "versions are in the folders weights/ and best/ of its run"
                )
            raise CheckpointError(f"{saved.folder}: has no {wanted}; is it a checkpoint of another model?")
        before, whole = [parameter.layer] if key not in same else [], saved.size(key)
        sizes = list(whole)[len(before) :]
        start, padding = [0] * len(sizes), 0
        experts = shape.experts.num_experts if shape.experts and entry.is_of_experts else sizes[0]
        if (before and whole[0] != shape.num_layers) or sizes[0] != experts:
            model = f"{shape.num_layers}{f', with {experts} experts' if entry.is_of_experts else ''}"
            raise CheckpointError(
                f"{saved.folder}: {key} has the size {list(whole)}, the model's num_hidden_layers is {model}; is it a "
                "checkpoint of another model?"
            )
        if entry.is_of_experts and not entry.is_fused:
            start[0], sizes[0] = parameter.expert, 1
        elif entry.cut == "vocabulary":  # padding may follow it
            padding, sizes[0] = max(0, sizes[0] - shape.vocabulary_size), shape.vocabulary_size
        like = torch.empty(sizes, dtype=saved.dtype(key), device="meta")
        try:
            made = weight_cuts.unfuse([like], entry.cut, shape)
        except RuntimeError as error:
            raise CheckpointError(
                f"{saved.folder}: {key} has the size {sizes}, which is not the model's: {error}"
            ) from None
        entries = [
            TensorEntry(name=name, dtype=one.dtype, shape=tuple(one.shape))
            for name, one in zip(entry.huggingface, made, strict=True)
        ]
        return cls(
            parameter=parameter,
            key=key,
            start=(*before, *start),
            sizes=tuple(sizes),
            entries=tuple(entries),
            padding=padding,
        )

    def read(self, saved: TorchDist) -> torch.Tensor:
        before = (1,) * (len(self.start) - len(self.sizes))
        return saved.read(self.key, self.start, (*before, *self.sizes)).view(self.sizes)


def _cut_into_files(parameters: Sequence[_StoredParameter]) -> list[list[_StoredParameter]]:
    files: list[list[_StoredParameter]] = [[]]
    room = FILE_BYTES
    for one in parameters:
        size = sum(entry.num_bytes for entry in one.entries)
        if files[-1] and size > room:
            files.append([])
            room = FILE_BYTES
        files[-1].append(one)
        room -= size
    return files


def _blocks(file: Sequence[_StoredParameter], saved: TorchDist, shape: ModelShape) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file."""
    yield safetensors_file.header(entry for one in file for entry in one.entries)
    for one in file:
        for tensor in weight_cuts.unfuse([one.read(saved)], one.parameter.entry.cut, shape):
            yield tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
