"""Logprobs over the tokens that each was sampled from, computed in chunks of rows, against autograd on whole logits."""

from __future__ import annotations

import pytest
import torch

from asyncrl.backends.kernels import token_logprobs
from asyncrl.backends.kernels.support import exclude


@pytest.mark.parametrize("rows_per_chunk", [2, 100])
@pytest.mark.parametrize("keeps_logits", [False, True])
def test_gradients_of_logprobs_and_entropy_are_over_the_support(
    rows_per_chunk: int, keeps_logits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(token_logprobs._CHUNK_NUMBERS, "cpu", rows_per_chunk * 7)
    torch.manual_seed(0)
    hidden, weight = torch.randn(5, 4), torch.randn(7, 4)
    targets, temperatures = torch.tensor([1, 2, 3, 4, 5]), torch.tensor([1.0, 0.5, 2.0, 1.0, 0.7])[:, None]
    support = (torch.tensor([0, 0, 2, 4, 4, 4]), torch.tensor([1, 6, 3, 0, 5, 2]))  # rows 1 and 3: the whole vocabulary
    found, expected = [], []
    for kind in (found, expected):
        inputs = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        if kind is found:
            logprobs, entropy = token_logprobs.linear_logprobs(
                *inputs,
                targets,
                temperature=temperatures,
                vocabulary_size=7,
                keeps_logits=keeps_logits,
                support=support,
            )
        else:
            is_in = torch.tensor([[n in of for n in range(7)] for of in ({1, 6}, range(7), {3}, range(7), {0, 5, 2})])
            logits = (inputs[0] @ inputs[1].t() / temperatures).masked_fill(~is_in, -torch.inf)
            every = torch.log_softmax(logits, -1)
            logprobs = every.gather(1, targets[:, None])[:, 0]
            entropy = -(every.exp() * every.masked_fill(~is_in, 0.0)).sum(-1)
        kind += [logprobs, entropy, *torch.autograd.grad((logprobs * torch.arange(5) + entropy).sum(), inputs)]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_a_rank_without_any_token_of_a_support_adds_nothing() -> None:
    """Ranks of 4 and 3 tokens: their statistics, merged, are those of the whole vocabulary."""
    logits, columns = torch.randn(2, 7), torch.tensor([5, 1])
    numbers, tokens = torch.tensor([0, 0]), torch.tensor([5, 6])
    parts = [
        exclude(logits[:, :4].clone(), numbers, tokens),
        exclude(logits[:, 4:].clone(), numbers, tokens, first_token=4),
    ]
    torch.testing.assert_close(torch.cat(parts, 1), exclude(logits.clone(), numbers, tokens))
    statistics = [
        token_logprobs.fused.row_statistics(
            part, torch.where((columns >= at) & (columns < at + 4), columns - at, -1), 1.0
        )
        for part, at in zip(parts, (0, 4), strict=True)
    ]
    assert all(of.isfinite().all() for of in statistics)
    largest, scales = torch.maximum(statistics[0][0], statistics[1][0]), [of[0] for of in statistics]
    total = sum(of[1] * (scale - largest).exp() for of, scale in zip(statistics, scales, strict=True))
    assert total[0] == pytest.approx(float((logits[0, 5:] - largest[0]).exp().sum()), rel=1e-5)
