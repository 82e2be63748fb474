"""A stand-in for DeepEP's Buffer (github.com/deepseek-ai/DeepEP, deep_ep/buffer.py) that exchanges tokens over gloo.

It has what Megatron's dispatcher "flex" calls, with DeepEP's shapes: a token goes once to each rank that has some of
its experts, and numbers of experts are the receiver's own, -1 for those of others. Importing this module installs it
in Megatron; a job whose fields hold DISPATCHER imports it on every rank.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist


class Event:
    def current_stream_wait(self) -> None:
        pass


class EventOverlap(Event):
    def __init__(self, _event: object) -> None:
        pass


@dataclass
class Handle:
    """sent: bool[n, ranks], the tokens that go to each rank; received: how many came from each"""

    sent: torch.Tensor
    received: list[int]


class _Hint:
    def get_nvl_buffer_size_hint(self, hidden_bytes: int, ranks: int) -> int:
        return hidden_bytes * ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, ranks: int) -> int:
        return 0


class Buffer:
    num_sms = 0

    def __init__(self, group: Any, num_nvl_bytes: int, num_rdma_bytes: int) -> None:
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes

    @staticmethod
    def set_num_sms(number: int) -> None:
        Buffer.num_sms = number

    @staticmethod
    def get_dispatch_config(_ranks: int) -> _Hint:
        return _Hint()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx: torch.Tensor, num_experts: int, **_: Any) -> tuple[Any, ...]:
        ranks = self.group.size()
        sent = torch.stack([(topk_idx // (num_experts // ranks) == rank).any(1) for rank in range(ranks)], dim=1)
        return sent.sum(0), None, torch.bincount(topk_idx.flatten(), minlength=num_experts), sent, Event()

    def dispatch(self, x: torch.Tensor, *, handle: Handle | None = None, **given: Any) -> tuple[Any, ...]:
        if handle is not None:
            return self._spread(x, handle), None, None, None, None, Event()
        sent, each = given["is_token_in_rank"], len(given["num_tokens_per_expert"]) // self.group.size()
        counts = sent.sum(0)
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=self.group)
        handle = Handle(sent, received.tolist())
        experts = self._spread(given["topk_idx"], handle) - self.group.rank() * each
        is_ours = (experts >= 0) & (experts < each)
        weights = self._spread(given["topk_weights"], handle).where(is_ours, 0)
        experts = experts.where(is_ours, -1)
        numbers = [int((experts == expert).sum()) for expert in range(each)]
        return self._spread(x, handle), experts, weights, numbers, handle, Event()

    def combine(
        self, x: torch.Tensor, handle: Handle, *, topk_weights: torch.Tensor | None = None, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None, Event]:
        return self._add(x, handle), None if topk_weights is None else self._add(topk_weights, handle), Event()

    def _spread(self, rows: torch.Tensor, handle: Handle) -> torch.Tensor:
        """Send each row to the ranks that get it."""
        found = rows.new_empty(sum(handle.received), *rows.shape[1:])
        own = torch.cat([rows[mask] for mask in handle.sent.T])
        dist.all_to_all_single(found, own, handle.received, handle.sent.sum(0).tolist(), group=self.group)
        return found

    def _add(self, rows: torch.Tensor, handle: Handle) -> torch.Tensor:
        """Return each row to where it came from, and add up what comes back there."""
        back = handle.sent.sum(0).tolist()
        found = rows.new_empty(sum(back), *rows.shape[1:])
        dist.all_to_all_single(found, rows.contiguous(), back, handle.received, group=self.group)
        sums = rows.new_zeros(len(handle.sent), *rows.shape[1:])
        for mask, part in zip(handle.sent.T, found.split(back), strict=True):
            sums[mask] += part
        return sums


class Dispatcher(str):
    """Megatron's "flex", whose class a rank imports from here."""


DISPATCHER = Dispatcher("flex")


def install() -> None:
    """Import Megatron's calls of DeepEP again, now that it is there."""
    utils = ModuleType("deep_ep.utils")
    package: Any = ModuleType("deep_ep")
    utils.EventHandle, utils.EventOverlap = object, EventOverlap  # type: ignore[attr-defined]
    package.Buffer, package.utils = Buffer, utils
    sys.modules |= {"deep_ep": package, "deep_ep.utils": utils}
    try:
        calls = importlib.reload(importlib.import_module("megatron.core.transformer.moe.fused_a2a"))
    finally:
        del sys.modules["deep_ep"], sys.modules["deep_ep.utils"]
    dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    for name in ("fused_dispatch", "fused_combine", "set_deepep_num_sms"):
        setattr(dispatcher, name, getattr(calls, name))


install()
