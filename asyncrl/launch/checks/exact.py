"""Checks run.exact: learner and engines must compute with the same modules on the same kind of device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError

_MODELS: Final = {
    "inprocess": ("Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM"),
    "sglang": ("Qwen3ForCausalLM",),
}
"""Architectures whose every operation over a whole row is one of those in tensors/exact_rows.py, and those in which
SGLang's --rl-on-policy-target reaches every layer (0.5.23: models/qwen3.py, not models/qwen2.py or models/llama.py)."""


def check(run: RunConfig) -> None:
    """Raise ConfigError if the run asks for exact logprobs and cannot have them."""
    if not run.run.exact:
        return
    config = json.loads((Path(run.model.path) / "config.json").read_text())
    architecture = (config.get("architectures") or [""])[0]
    _check_engines(run)
    models, is_served = _MODELS[run.engine.kind], run.engine.kind == "sglang"
    for is_wrong, problem in (
        (
            run.learner.backend != "reference",
            f'learner.backend = "{run.learner.backend}" fuses and splits products, which rounds them in another way '
            'than engines do; use "reference"',
        ),
        (
            architecture not in models,
            f'model.path: {architecture} was not tried with engine.kind = "{run.engine.kind}"; use one of '
            f"{', '.join(models)}",
        ),
        (
            config.get("use_sliding_window") or "sliding_attention" in (config.get("layer_types") or ()),
            "model.path: exact attention has no sliding window, and config.json asks for one; use another model",
        ),
        (
            is_served and (run.rollout.top_p < 1 or run.rollout.top_k),
            "rollout.top_p, rollout.top_k: SGLang rounds the logprobs of what these leave in another way than all; use "
            "top_p = 1.0 and top_k = 0",
        ),
        (
            run.weights.quantization,
            f'weights.quantization: "{run.weights.quantization}" rounds the weights of engines alone; remove it',
        ),
    ):
        if is_wrong:
            raise ConfigError(f"run.exact: {problem}")


def _check_engines(run: RunConfig) -> None:
    """Check the engines of the run and of its pools, which the one learner must be equal to."""
    for pool in ("", *run.rollout.pools):
        engine = run.of_pool(pool).engine
        where = f"rollout.pools.{pool}.options" if pool else "engine.options"
        devices = {engine.device, run.learner.device}
        threads, ranks = engine.options.get("threads", 0), engine.options.get("tensor_parallel", 1)
        for is_wrong, problem in (
            (
                (engine.kind, *sorted(devices)) not in (("inprocess", "cpu"), ("sglang", "cuda")),
                f'engine.kind = "{engine.kind}" on {engine.device} rounds in another way than a learner on '
                f'{run.learner.device}; use "inprocess" with engine.device and learner.device = "cpu", or "sglang" '
                'with both "cuda"',
            ),
            (
                engine.options.get("url", "") or ranks > 2,
                f"{where}: the server must be started by the run, on one GPU or two, because only sums of two have "
                "one order; remove url, and set tensor_parallel to 1 or 2",
            ),
            (
                ranks != run.engine.options.get("tensor_parallel", 1),
                f"{where}: tensor_parallel = {ranks} adds in another order than the other engines, and the learner can "
                "do as one of them; use the same number",
            ),
            (
                engine.kind == "inprocess" and (threads != run.learner.threads or threads == 0),
                f"{where}.threads = {threads} and learner.threads = {run.learner.threads} split products in "
                "different ways; set both to the same number",
            ),
        ):
            if is_wrong:
                raise ConfigError(f"run.exact: {problem}")
