"""Checks run.exact: learner and engines must compute with the same modules on the same kind of device."""

from __future__ import annotations

import json
from pathlib import Path

from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError

_MODELS = ("Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM")
"""Architectures whose every operation over a whole row is one of those in tensors/exact_rows.py."""


def check(run: RunConfig) -> None:
    """Raise ConfigError if the run asks for exact logprobs and cannot have them."""
    if not run.run.exact:
        return
    architectures = json.loads((Path(run.model.path) / "config.json").read_text()).get("architectures") or [""]
    devices = {run.engine.device, run.learner.device}
    threads = run.engine.options.get("threads", 0)
    for is_wrong, problem in (
        (
            run.learner.backend != "reference",
            f'learner.backend = "{run.learner.backend}" fuses and splits products, which rounds them in another way '
            'than engines do; use "reference"',
        ),
        (
            (run.engine.kind, *sorted(devices)) not in (("inprocess", "cpu"), ("sglang", "cuda")),
            f'engine.kind = "{run.engine.kind}" on {run.engine.device} rounds in another way than a learner on '
            f'{run.learner.device}; use "inprocess" with engine.device and learner.device = "cpu", or "sglang" with '
            'both "cuda"',
        ),
        (
            run.engine.options.get("url", "") or run.engine.options.get("tensor_parallel", 1) > 2,
            "engine.options: the server must be started by the run, on one GPU or two, because only sums of two have "
            "one order; remove url, and set tensor_parallel to 1 or 2",
        ),
        (
            architectures[0] not in _MODELS,
            f"model.path: {architectures[0]} was not tried; use one of {', '.join(_MODELS)}",
        ),
        (
            run.engine.kind == "inprocess" and (threads != run.learner.threads or threads == 0),
            f"engine.options.threads = {threads} and learner.threads = {run.learner.threads} split products in "
            "different ways; set both to the same number",
        ),
    ):
        if is_wrong:
            raise ConfigError(f"run.exact: {problem}")
