"""On a GPU, what tensors/exact_rows.py is on a CPU: SGLang's batch-invariant kernels in the learner's forward pass.

A server with --rl-on-policy-target fsdp computes as a transformers model in float32 under autocast to bfloat16: the
residual stream, norms and rotary embeddings in float32, products and attention (FlashAttention 3) in bfloat16, logits
rounded to bfloat16 before and after the temperature. Written from SGLang 0.5.23; equality was never measured here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from sglang.srt.batch_invariant_ops import set_batch_invariant_mode

ATTENTION = "flash_attention_3"


@contextlib.contextmanager
def sglang_rows() -> Iterator[None]:
    with set_batch_invariant_mode(True), torch.autocast("cuda", torch.bfloat16):
        yield


def log_softmax(logits: torch.Tensor, temperature: float | torch.Tensor) -> torch.Tensor:
    """logits [M, V], temperature one or [M, 1] -> f32[M, V], rounded as the server's sampler rounds."""
    return torch.log_softmax(logits.bfloat16().div(temperature).bfloat16(), dim=-1).float()
