"""Under ExactRows, a token's logits do not depend on its neighbours, and gradients are the ordinary ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from asyncrl.data.tiny_model import make_tiny_model
from asyncrl.tensors.exact_rows import ExactRows, use_exact_attention
from asyncrl.tensors.transformers_models import LOADING


def model(folder: Path, architecture: str = "qwen3", dtype: torch.dtype = torch.float32) -> Any:
    make_tiny_model(folder, architecture=architecture, initializer_range=0.2)
    with LOADING:
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


TOKENS = torch.randint(4, 40, (5, 33), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
@torch.no_grad()
def test_a_token_s_logits_do_not_depend_on_its_neighbours(
    architecture: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    made = model(tmp_path, architecture, dtype)
    ordinary = made(TOKENS).logits
    use_exact_attention(made)
    with ExactRows():
        together = made(TOKENS).logits
        alone = torch.cat([made(row[None]).logits for row in TOKENS[:2]])
        cache = transformers.DynamicCache()
        decoded = [made(TOKENS[:1, :20], past_key_values=cache).logits]
        decoded += [made(TOKENS[:1, n : n + 1], past_key_values=cache).logits for n in range(20, 33)]
    assert torch.equal(together[:2], alone)
    assert torch.equal(together[:1], torch.cat(decoded, 1))
    torch.testing.assert_close(together, ordinary, atol=1e-4 if dtype == torch.float32 else 0.2, rtol=0.02)


def test_gradients_are_the_ordinary_ones(tmp_path: Path) -> None:
    made = model(tmp_path)
    found = []
    for is_exact in (False, True):
        made.zero_grad()
        if is_exact:
            use_exact_attention(made)
            with ExactRows():
                logits = made(TOKENS[:2]).logits
        else:
            logits = made(TOKENS[:2]).logits
        torch.log_softmax(logits, -1)[..., 7].mean().backward()  # type: ignore[no-untyped-call]
        found.append({name: parameter.grad.clone() for name, parameter in made.named_parameters()})
    for name, ordinary in found[0].items():
        torch.testing.assert_close(found[1][name], ordinary, atol=1e-6, rtol=1e-3, msg=name)
