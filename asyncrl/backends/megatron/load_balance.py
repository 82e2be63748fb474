"""The load-balancing loss of a mixture's routers, and how evenly they use their experts.

In a layer, a packed row of T tokens has the loss E sum_e f_e P_e (Switch Transformer, arXiv:2101.03961, eq. 4 to 6):
f_e is the share of the row's T k choices that falls on expert e, P_e the mean of its score after normalisation over all
E experts. The loss is 1 if the router prefers all experts alike, and at most E / k. A batch has the mean over its
tokens, summed over layers, times learner.options.aux_loss_coefficient. Only the policy has this loss.

Megatron's own loss is not used. It multiplies the loss by the row's tokens and expects the gradients to be divided by
the batch's tokens later, but our loss weights already include their denominators. It also counts padding, and the rows
of a batch alike, however long they are.
Tests: tests/unit/backends/megatron/test_load_balance.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from asyncrl.backends.families.shape import ModelShape
from asyncrl.backends.megatron.process_groups import all_reduce, shared_rows_group, tensor_parallel_group
from asyncrl.backends.megatron.row_part import RowPart


class RouterTally:
    """What the passes of one router with gradients add up to, on this rank.

    chosen  f32[E]: how often each expert was chosen
    loss    the part of the loss that this rank computed, without the coefficient; None if there is no such loss
    """

    def __init__(self) -> None:
        self.chosen: torch.Tensor | None = None
        self.loss: torch.Tensor | None = None

    def reset(self) -> None:
        self.chosen = self.loss = None

    def add(self, row: RowPart, config: Any, logits: torch.Tensor, is_chosen: torch.Tensor) -> torch.Tensor | None:
        """Count the experts that a pass chose for the row, and return this rank's part of its loss, if there is one.

        config  Megatron's TransformerConfig
        logits  f32[n, E] of this rank's tokens, padding included;  is_chosen: bool[n, E]
        """
        if not row.share_of_batch:
            return None
        num_unpadded = unpadded_tokens(row, len(logits), config)
        copies = copies_of_tokens(row, len(logits), config)
        of_tokens = is_chosen[:num_unpadded]
        chosen = of_tokens.sum(0, dtype=torch.float32) if copies is None else copies[:num_unpadded] @ of_tokens.float()
        self.chosen = chosen if self.chosen is None else self.chosen + chosen
        if not config.moe_aux_loss_coeff:
            return None
        loss = balance_loss(
            logits[:num_unpadded],
            experts_per_token=config.moe_router_topk,
            scores=config.moe_router_score_function,
            num_tokens=row.micro_batch.num_tokens,
            group=shared_rows_group(),
            copies=None if copies is None else copies[:num_unpadded],
        )
        loss = loss * row.share_of_batch
        self.loss = loss.detach() if self.loss is None else self.loss + loss.detach()
        return loss * float(config.moe_aux_loss_coeff)


def balance_loss(
    logits: torch.Tensor,
    *,
    experts_per_token: int,
    scores: str,
    num_tokens: int,
    group: dist.ProcessGroup,
    copies: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return this rank's part of a row's loss in one layer. The parts of the ranks that share the row add up to it.

    What counts is the router's own choice, by its scores alone: no bias, no groups of experts, no replay.

    logits      f32[n, E] of this rank's tokens
    scores      "softmax" or "sigmoid"
    num_tokens  tokens of the row on all ranks of ``group``, each with its copies
    copies      f32[n]: how many sequences share each token; None: every token counts once
    """
    num_experts = logits.shape[1]
    if scores == "softmax":
        shares = logits.softmax(1)
    else:
        shares = logits.sigmoid()
        shares = shares / shares.sum(1, keepdim=True).clamp(min=1e-20)
    best = shares.detach().topk(experts_per_token, dim=1).indices
    is_chosen = torch.zeros_like(shares.detach()).scatter_(1, best, 1.0)
    chosen, preferred = (x.sum(0) if copies is None else copies @ x for x in (is_chosen, shares))
    all_reduce(chosen, group)
    return (preferred @ chosen) * (num_experts / (experts_per_token * num_tokens**2))


def unpadded_tokens(row: RowPart, num_tokens: int, config: Any) -> int:
    """Return how many of a layer's ``num_tokens`` are not padding; they come first.

    Sequence-parallel ranks have one piece each of the row's part.
    """
    return min(max(row.num_unpadded - _tokens_before(num_tokens, config), 0), num_tokens)


def copies_of_tokens(row: RowPart, num_tokens: int, config: Any) -> torch.Tensor | None:
    """Return how many tokens of its sequences each of a layer's ``num_tokens`` stands for; None: one each.  f32[n]"""
    if row.shared is None:
        return None
    before = _tokens_before(num_tokens, config)
    return row.shared.num_copies[before : before + num_tokens]


def _tokens_before(num_tokens: int, config: Any) -> int:
    """Return the tokens of the row's part on sequence-parallel ranks before this one."""
    return tensor_parallel_group().rank() * num_tokens if config.sequence_parallel else 0


class _WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, values: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(torch.ones_like(loss))
        return values.view_as(values)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        return gradient, *context.saved_tensors


def with_loss(values: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    """Return ``values``, whose backward pass also computes the gradients of ``loss``, whatever uses the values."""
    made: torch.Tensor = _WithLoss.apply(values, loss)  # type: ignore[no-untyped-call]
    return made


class ExpertBalance:
    """How the policy's routers use their experts in a step. Empty for a model without experts."""

    def __init__(
        self, tallies: Mapping[int, RouterTally], shape: ModelShape, *, has_loss: bool, device: torch.device
    ) -> None:
        """tallies: of this rank's part of the policy, by layer"""
        self._tallies = tallies
        self._layers = [layer for layer in range(shape.num_layers) if shape.has_experts(layer)]
        self._num_experts = shape.experts.num_experts if shape.experts else 0
        self._has_loss = has_loss
        self._device = device

    def reset(self) -> None:
        for tally in self._tallies.values():
            tally.reset()

    def summary(self) -> torch.Tensor:
        """Return f64[4] of all ranks, or f64[0], for ``metrics``. Collective; waits for nothing on the host."""
        if not self._layers:
            return torch.zeros(0, dtype=torch.float64, device=self._device)
        none = torch.zeros(self._num_experts, device=self._device)
        tallies = [self._tallies.get(layer, RouterTally()) for layer in self._layers]
        of_chosen = torch.stack([none if one.chosen is None else one.chosen for one in tallies])
        of_losses = torch.stack([none[0] if one.loss is None else one.loss for one in tallies])
        table = torch.cat([of_chosen, of_losses[:, None]], dim=1)
        all_reduce(table, dist.group.WORLD)
        chosen, losses = table[:, :-1].double(), table[:, -1].double()
        even = chosen.mean(1).clamp(min=1e-30)
        most, unused = (chosen.amax(1) / even).mean(), (chosen == 0).double().mean()
        return torch.stack([chosen.sum(), most, unused, losses.mean()])

    def metrics(self, summary: Sequence[float]) -> dict[str, float]:
        """Return the step's metrics, means over layers; {} for a model without experts, or a batch without tokens."""
        if not self._layers or not summary[0]:
            return {}
        _, most, unused, loss = summary
        of_loss = {"learner/aux_loss": loss} if self._has_loss else {}
        return {"learner/expert_load_max": most, "learner/experts_unused": unused, **of_loss}
