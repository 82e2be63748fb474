"""Refuses models whose rotary embeddings SGLang computes in another way than transformers.

The learner computes what transformers computes (backends/families/family.py), and so does the in-process engine. Where
SGLang differs, samples would come from another model than the one that is trained, and no error would say so. Compared
with SGLang 0.5.23 (layers/rotary_embedding, models/gemma3_causal.py) and transformers' modeling_rope_utils.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from asyncrl.errors import ConfigError

_WITHOUT_FACTOR: Final = "Gemma3ForCausalLM"
"""SGLang reads only the base of its frequencies (rope_theta)."""
_ONLY_SGLANG: Final = ("attn_factor", "extrapolation_factor")
"""YaRN's keys that transformers ignores. Their default is 1."""


def check(model_path: Path) -> None:
    """Raise ConfigError if SGLang and the learner would rotate queries and keys differently.

    Ignores a folder that cannot be read; others report it.
    """
    try:
        config = json.loads((model_path / "config.json").read_text())
        of = _of_gemma if config.get("architectures", [""])[0] == _WITHOUT_FACTOR else _of_yarn
        problem = next(filter(None, map(of, _tables(config))), "")
    except (OSError, ValueError, TypeError, AttributeError, LookupError):
        return
    if problem:
        raise ConfigError(f'model.path: {model_path}: config.json has {problem} or engine.kind = "inprocess"')


def _tables(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the rotary settings: one table, or one for each kind of layer."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    nested = [table for table in rope.values() if isinstance(table, dict)]
    yield from nested or [rope]


def _kind(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type", rope.get("type", "default")))


def _of_gemma(rope: Mapping[str, Any]) -> str:
    if _kind(rope) == "default" or rope.get("factor", 1.0) == 1.0:
        return ""
    said = f"rope type {_kind(rope)!r} with factor = {rope['factor']}"
    return f"{said}, which the learner uses and SGLang ignores for Gemma 3; use a smaller Gemma 3 (270M, 1B)"


def _of_yarn(rope: Mapping[str, Any]) -> str:
    if _kind(rope) != "yarn":
        return ""
    mend = "replace it by mscale and mscale_all_dim, which both read (1 and 1: cosines are not scaled),"
    for key in _ONLY_SGLANG:
        if (value := rope.get(key, 1)) != 1:
            return f"{key} = {value}, which SGLang uses and the learner ignores; {mend}"
    value = rope.get("attention_factor")
    if value is not None and not math.isclose(value, _default_scale(rope), rel_tol=1e-4):
        return f"attention_factor = {value}, which the learner uses and SGLang ignores; {mend}"
    return ""


def _default_scale(rope: Mapping[str, Any]) -> float:
    """Return YaRN's scale of cosines and sines without attention_factor; both compute it like this."""
    log = math.log(max(rope["factor"], 1.0))
    one, all_dimensions = rope.get("mscale"), rope.get("mscale_all_dim")
    if one and all_dimensions:
        return float((0.1 * one * log + 1.0) / (0.1 * all_dimensions * log + 1.0))
    return 0.1 * log + 1.0
