"""The numbers of docs/concepts/derivations.md are right, and its formulas are those of the code."""

from __future__ import annotations

import re

import pytest
import torch

from asyncrl.policies.losses.centered import ScoreCentered
from asyncrl.policies.losses.loss import LikeliestTokens
from tests import ROOT

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "concepts" / "derivations.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_every_block_holds(number: int) -> None:
    assert "assert " in BLOCKS[number]
    exec(BLOCKS[number], {})


def test_the_drift_of_a_cap_is_what_score_centering_takes_away() -> None:
    names: dict[str, object] = {}
    exec(next(block for block in BLOCKS if "drift" in block), names)
    pi, mu = torch.tensor([names["pi"]]), torch.tensor([names["mu"]])
    gradients = torch.zeros(3)
    for token in range(3):
        logits = pi.log().requires_grad_()
        every = torch.log_softmax(logits, -1)
        loss, _ = ScoreCentered(cap=names["cap"]).formula(  # type: ignore[arg-type]
            logprobs=every[:, token],
            behavior_logprobs=mu.log()[:, token],
            advantages=torch.ones(1),
            entropy=-(every.exp() * every).sum(-1),
            logits=logits,
            behavior_likeliest=LikeliestTokens(tokens=torch.arange(3)[None], logprobs=mu.log()),
        )
        torch.autograd.backward(loss.sum())
        assert logits.grad is not None
        gradients += mu[0, token] * logits.grad[0]
    torch.testing.assert_close(gradients, torch.zeros(3), atol=1e-6, rtol=0)
