"""New prompts wait for each other: each prefill stops decoding, and one of 30 prompts costs little more than one of 1.

Where answers end one by one, SGLang prefills one new prompt at a time by default; with 256 answers of a 0.6B model in
progress that takes a third of the time, and half without CUDA graphs for prefills (docs/results/performance.md,
"Answers that end at different times").
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from asyncrl.engines.sglang.arguments import known_arguments, option_name

ARGUMENTS: Final[Mapping[str, Any]] = {
    "enable-prefill-delayer": True,
    "prefill-delayer-queue-min-ratio": 0.12,
    "prefill-delayer-max-delay-ms": 500,
}
"""A prefill waits until prompts for an eighth of the running requests are there, half a second at most; with fewer than
17 running it never waits."""

_OWN_WAYS: Final = (
    "disable-overlap-schedule",  # refused beside the delayer; so are those that disable it
    *("speculative-", "pp-size", "pipeline-parallel-size", "dllm-", "disaggregation-"),
    *("tp-size", "tensor-parallel-size", "dp-size", "data-parallel-size", "enable-dp-"),  # ranks would agree each step
    "max-running-requests",  # the delayer then holds prompts back, for any time, until as many places are free
    "config",  # a file with any of these
    *ARGUMENTS,
    "prefill-delayer-",
)
"""Beginnings of options with which the server is left as it is."""


def prefill_arguments(
    model_path: Path, server_arguments: Mapping[str, Any], *, device: str, tensor_parallel: int
) -> Mapping[str, Any]:
    """ARGUMENTS, or nothing where this SGLang, model or server cannot have them, or the user chose otherwise."""
    names = [name for key in server_arguments for name in _meant(option_name(key))]
    if device != "cuda" or tensor_parallel > 1 or any(name.startswith(_OWN_WAYS) for name in names):
        return {}
    try:
        config = json.loads((model_path / "config.json").read_text())
    except (OSError, ValueError):  # the server says what is wrong with it
        return {}
    if (
        not isinstance(config, dict)
        or _has_recurrent_layers(config)
        or not known_arguments().keys() >= ARGUMENTS.keys()
    ):
        return {}
    return ARGUMENTS


def _meant(name: str) -> list[str]:
    """The options that ``name`` may abbreviate: the server takes any beginning that is clear."""
    known = known_arguments()
    return [name] if name in known else [name, *(option for option in known if option.startswith(name))]


def _has_recurrent_layers(config: Mapping[str, Any]) -> bool:
    """For some of these models SGLang disables overlapped scheduling by itself, and of others it runs few requests at
    once, for memory. A model with images has its layers in a part, such as text_config."""
    layers = config.get("layer_types")
    kinds = map(str, layers) if isinstance(layers, list) else ()
    return (
        any("linear" in kind or not kind.endswith("attention") for kind in kinds)  # mamba, conv, jet
        or any(key.startswith(("mamba", "linear_", "ssm_", "cca")) for key in config)
        or any(_has_recurrent_layers(part) for part in config.values() if isinstance(part, Mapping))
    )
