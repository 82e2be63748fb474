"""Delays prefills so that new prompts are batched: each prefill stops decoding, and 30 prompts cost little more than 1.

When answers end one by one, SGLang by default prefills one new prompt at a time. With 256 answers of a 0.6B model in
progress this takes a third of the time, and half without CUDA graphs for prefills (docs/results/performance.md,
"Answers that end at different times").
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from asyncrl.engines.sglang.options import known_arguments, option_name

ARGUMENTS: Final[Mapping[str, Any]] = {
    "enable-prefill-delayer": True,
    "prefill-delayer-queue-min-ratio": 0.12,
    "prefill-delayer-max-delay-ms": 500,
}
"""A prefill waits until the number of waiting prompts is an eighth of the running requests, for at most half a second.
With fewer than 17 running requests it never waits."""

_OWN_WAYS: Final = (
    "disable-overlap-schedule",  # SGLang refuses it with the delayer, and also the options below that imply it
    *("speculative-", "pp-size", "pipeline-parallel-size", "dllm-", "disaggregation-"),
    *("tp-size", "tensor-parallel-size", "dp-size", "data-parallel-size", "enable-dp-"),  # ranks would sync each step
    "max-running-requests",  # the delayer then also waits, beyond max-delay-ms, for slots for a whole batch
    "config",  # a file that may set any of these
    *ARGUMENTS,
    "prefill-delayer-",
)
"""Prefixes of options. If any is set, the server's prefill options are left unchanged."""


def prefill_arguments(
    model_path: Path, server_arguments: Mapping[str, Any], *, device: str, tensor_parallel: int
) -> Mapping[str, Any]:
    """Return ARGUMENTS, or nothing if the SGLang, model or server cannot use them or the user chose otherwise."""
    names = [name for key in server_arguments for name in _meant(option_name(key))]
    if device != "cuda" or tensor_parallel > 1 or any(name.startswith(_OWN_WAYS) for name in names):
        return {}
    try:
        config = json.loads((model_path / "config.json").read_text())
    except (OSError, ValueError):  # the server reports what is wrong with the file
        return {}
    if (
        not isinstance(config, dict)
        or _has_recurrent_layers(config)
        or not known_arguments().keys() >= ARGUMENTS.keys()
    ):
        return {}
    return ARGUMENTS


def _meant(name: str) -> list[str]:
    """Return the options that ``name`` may abbreviate: the server accepts any unambiguous prefix."""
    known = known_arguments()
    return [name] if name in known else [name, *(option for option in known if option.startswith(name))]


def _has_recurrent_layers(config: Mapping[str, Any]) -> bool:
    """Return whether any layer is recurrent. For some such models SGLang disables overlapped scheduling by itself; for
    others it runs few requests at once to save memory. A model with images nests its layers, as in text_config."""
    layers = config.get("layer_types")
    kinds = map(str, layers) if isinstance(layers, list) else ()
    return (
        any("linear" in kind or not kind.endswith("attention") for kind in kinds)  # mamba, conv, jet
        or any(key.startswith(("mamba", "linear_", "ssm_", "cca")) for key in config)
        or any(_has_recurrent_layers(part) for part in config.values() if isinstance(part, Mapping))
    )
