"""Names and shapes of a model's tensors: read them from a folder, keep the trained ones, compare two layouts."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import safetensors

from asyncrl.errors import WeightsError
from asyncrl.tensors import weight_files

Shapes = Mapping[str, tuple[int, ...]]
"""Tensor shapes of a checkpoint by tensor name."""

_FREQUENCIES: Final = ".rotary_emb.inv_freq"
_MULTI_TOKEN: Final = "mtp."


def read_shapes(folder: Path) -> Shapes:
    """Return the tensor shapes in a Hugging Face folder, reading only the headers, and each of them once as long as its
    file stays as it is. Raises WeightsError."""
    try:
        stats = [(path, path.stat()) for path in weight_files.paths(folder)]
        return _read_headers(tuple((path, stat.st_size, stat.st_mtime_ns) for path, stat in stats))
    except (OSError, ValueError, KeyError, safetensors.SafetensorError) as error:
        raise WeightsError(f"{folder}: cannot read its weights: {error}") from error


@functools.lru_cache(maxsize=4)  # a run's models, which `asyncrl check` asks for twenty times
def _read_headers(files: tuple[tuple[Path, int, int], ...]) -> Shapes:
    """files: path, bytes and time of the last change"""
    shapes: dict[str, tuple[int, ...]] = {}
    for path, *_ in files:
        with safetensors.safe_open(path, framework="np") as file:
            shapes.update({key: tuple(file.get_slice(key).get_shape()) for key in file.keys()})  # noqa: SIM118
    return MappingProxyType(shapes)


def trained_shapes(shapes: Shapes, config: Mapping[str, Any]) -> Shapes:
    """Drop what no learner exports: multi-token-prediction layers, and rotary frequencies.

    Multi-token prediction is in layers after ``num_hidden_layers``, or under a name of its own (Qwen3-Next). Older
    conversions of Llama have the frequencies; transformers and engines compute them and skip these tensors.
    """
    shapes = {
        name: shape
        for name, shape in shapes.items()
        if not name.endswith(_FREQUENCIES) and not name.startswith(_MULTI_TOKEN)
    }
    num_layers = config.get("num_hidden_layers", 0)
    if not isinstance(num_layers, int) or not config.get("num_nextn_predict_layers"):
        return shapes
    further = tuple(f"model.layers.{num_layers + extra}." for extra in range(config["num_nextn_predict_layers"]))
    return {name: shape for name, shape in shapes.items() if not name.startswith(further)}


_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.")


def without_draft_layers(found: Shapes, expected: Shapes) -> Shapes:
    """Drop the multi-token-prediction layers that a learner trained: they follow the last layer that is expected.

    Engines without a draft model skip them.
    """
    numbers = [int(match[1]) for name in expected if (match := _LAYER.match(name))]
    last = max(numbers, default=0)
    return {name: shape for name, shape in found.items() if not (m := _LAYER.match(name)) or int(m[1]) <= last}


def check_layout(found: Shapes, *, expected: Shapes, optional: frozenset[str], where: str) -> None:
    """Raise WeightsError unless ``found`` matches ``expected`` exactly; ``optional`` tensors may be absent, and draft
    layers there."""
    found = without_draft_layers(found, expected)
    problems = [f"{name} is missing" for name in expected if name not in found and name not in optional]
    problems += [f"{name} is not in the model" for name in found if name not in expected and name not in optional]
    problems += [
        f"{name} has shape {list(shape)}, the model's is {list(expected[name])}"
        for name, shape in found.items()
        if name in expected and shape != tuple(expected[name])
    ]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise WeightsError(f"{where}: {'; '.join(problems[:3])}{more}")
