"""What the engine needs to know of the model folder that its server reads."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.engines.sglang.routed_experts import ExpertShape
from asyncrl.errors import ConfigError, WeightsError
from asyncrl.tensors import quantized_model
from asyncrl.tensors.model_tensors import Shapes, read_shapes, trained_shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model folder as its config.json and the headers of its weights describe it.

    path             the folder; of a quantized copy if the server reads one
    quantization     format of the copy (tensors/quantized_model.py); empty if the server reads model.path
    shapes           tensors that a new version of the weights consists of
    optional_names   those that it may lack, because they are tied to others
    vocabulary_size  number of tokens
    context_tokens   context length in tokens, prompt and answer together
    experts          shape of what the server reports of each token's experts; None if it reports nothing
    """

    path: Path
    quantization: str = ""
    shapes: Shapes = field(default_factory=dict)
    optional_names: frozenset[str] = frozenset()
    vocabulary_size: int = 2**31
    context_tokens: int = 2**31
    experts: ExpertShape | None = None


def read(model: ServedModel, *, quantized: Path, tells_experts: bool) -> ServedModel:
    """Read the model folder at model.path, ``model.path``. Raises ConfigError.

    quantized      folder to write a copy in ``model.quantization`` to, which is served instead; unused without one
    tells_experts  whether the server is to report the experts of each token
    """
    path, quantization = model.path, model.quantization
    try:
        served = quantized_model.model_folder(path, quantized, quantization) if quantization else path
        config = json.loads((served / "config.json").read_text())
        shapes = trained_shapes(read_shapes(served), config)
    except (OSError, ValueError, WeightsError) as error:
        raise ConfigError(f"model.path={path}: {error}") from error
    return ServedModel(
        path=served,
        quantization=quantization,
        shapes=shapes,
        optional_names=frozenset({"lm_head.weight"} if config.get("tie_word_embeddings") else ()),
        vocabulary_size=int(config.get("vocab_size", 2**31)),
        context_tokens=int(config.get("max_position_embeddings") or 2**31),
        experts=ExpertShape.of(config) if tells_experts else None,
    )
