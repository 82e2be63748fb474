"""The GPU memory that a learner needs at its peak, so that an engine on the same GPU can take the rest.

An estimate from the model's folder and the run file. Constants were fitted on an H200 (docs/results/performance.md,
"One GPU").
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Final

from asyncrl.config.adapter import RunConfig
from asyncrl.tensors.model_tensors import read_shapes

COPIES: Final = 3
"""Versions of the weights beside the model: the newest, the one being made, and an older one still being written."""
_CONTEXT_BYTES: Final = 5 * 2**30
"""CUDA context, NCCL's buffers, kernels' workspaces."""
_FRAGMENTED: Final = 1.1
"""What torch's allocator holds for each byte of activations."""
_HEAD_BYTES: Final = 2 * 2**30
"""Logits in float32, a chunk at a time."""


def learner_bytes(run: RunConfig, *, recomputes_all: bool) -> int:
    """Return the peak bytes of one rank.  recomputes_all: only one activation per layer is kept"""
    folder = Path(run.model.path)
    shapes = read_shapes(folder)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    layout, width = run.learner.layout, 2 if run.model.dtype == "bfloat16" else 4
    parameters = sum(map(math.prod, shapes.values())) / (layout.tensor * layout.pipeline)
    rank = run.learner.lora.rank
    adapters = (
        rank * sum(sum(shape) for shape in shapes.values() if len(shape) == 2) / (layout.tensor * layout.pipeline)
    )
    trained = adapters if rank else parameters
    sharded = 12 / max(1, run.learner.data_parallel)  # float32 weights and both moments
    state = width * parameters + trained * (4 + sharded)
    has_reference = run.reference is not None and bool(run.reference.kl_coef)
    copies = width * parameters * (COPIES + int(has_reference))
    passes = _FRAGMENTED * (_passes(run, config, recomputes_all=recomputes_all) + _HEAD_BYTES)
    return int(state + copies + passes + _CONTEXT_BYTES)


def _passes(run: RunConfig, config: dict[str, Any], *, recomputes_all: bool) -> float:
    """Return the bytes of activations of one packed row, and of the output layer's gradient."""
    hidden, layers = config.get("hidden_size", 0), config.get("num_hidden_layers", 0)
    heads = config.get("num_attention_heads", 1)
    head = config.get("head_dim") or hidden // max(heads, 1)
    attention = head * (heads + 2 * config.get("num_key_value_heads", heads))
    experts = config.get("num_experts_per_tok") or 1
    feed_forward = config.get("moe_intermediate_size") or config.get("intermediate_size", 4 * hidden)
    # A layer keeps the inputs of its norms and products, the attention's inputs and output, the gate and its product.
    of_layer = 2 * (6 * hidden + 3 * attention + 3.6 * experts * feed_forward)
    kept = 2 * hidden * layers + of_layer if recomputes_all else of_layer * layers
    layout = run.learner.layout
    tokens = run.learner.micro_batch_tokens / (layout.tensor * layout.context)
    return float(tokens * kept / layout.pipeline + 6 * config.get("vocab_size", 0) * hidden / layout.tensor)
