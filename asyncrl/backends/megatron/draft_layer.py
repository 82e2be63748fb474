"""Multi-token prediction (DeepSeek-V3, arXiv:2412.19437 section 2.2): the layers with which an engine drafts tokens.

Layer k predicts token i + k + 1 from what layer k - 1 (the model, for k = 1) says of token i, and token i + k:

    tokens        t0 t1 t2 t3          hidden state of t0, embedding of t1 -> layer 1 -> t2
    the model     t0 -> t1             its output, embedding of t2         -> layer 2 -> t3

Engines speculate with them, and what they draft is rejected more often as the policy moves away. So they learn its
tokens by maximum likelihood. They see the model's hidden states, embedding and output layer without gradient: the
policy's gradients are those of a run without them.

Megatron's own MultiTokenPredictionLayer is not used: it rolls a whole row of packed sequences, without the parts of a
context-parallel rank that a row has here, sends its gradient into the model, and under sequence parallelism needs the
random states of CUDA. The layer within is Megatron's, as all others.
Tests: tests/unit/backends/megatron/test_draft_layers.py.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from asyncrl.backends.megatron import cpu_shim
from asyncrl.backends.megatron.adapters import WholeLinear
from asyncrl.backends.megatron.layers import Norm, RowParameters
from asyncrl.backends.megatron.log_filter import quiet
from asyncrl.backends.megatron.row_part import RowPart

with quiet(), cpu_shim.without_compilation():
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.spec_utils import ModuleSpec, build_module


class DraftLayer(MegatronModule):  # type: ignore[misc]
    """One multi-token-prediction layer: joins a hidden state and an embedding, then a layer of the model's kind."""

    def __init__(self, config: TransformerConfig, layer: ModuleSpec, *, number: int) -> None:
        """number: of the layer within, from 1, after those of the model"""
        super().__init__(config=config)
        width, eps = config.hidden_size, config.layernorm_epsilon
        self.enorm = Norm(config=config, hidden_size=width, eps=eps)
        self.hnorm = Norm(config=config, hidden_size=width, eps=eps)
        self.eh_proj = WholeLinear(
            2 * width, width, dtype=config.params_dtype, is_sequence_parallel=config.sequence_parallel
        )
        self.layer = build_module(layer, config=config, layer_number=number)
        self.final_layernorm = Norm(config=config, hidden_size=width, eps=eps)

    def forward(self, hidden: torch.Tensor, embedded: torch.Tensor, parameters: RowParameters) -> torch.Tensor:
        """hidden, embedded [n, 1, H] -> [n, 1, H]"""
        joined = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))
        after, _ = self.layer(hidden_states=joined, attention_mask=None, packed_seq_params=parameters)
        made: torch.Tensor = self.final_layernorm(after)
        return made


def without_routing(row: RowPart) -> RowPart:
    """Return the row for a layer that no engine and no earlier pass has routed."""
    return dataclasses.replace(row, experts=None, routing=None)


def later_tokens(row: RowPart, depth: int) -> torch.Tensor:
    """Return the token ``depth`` places later in the same sequence; its last one, where there is none.  i64[n]"""
    boundaries, length = row.boundaries, row.length
    sequence = np.searchsorted(boundaries[1:], np.arange(length), side="right")
    places = np.minimum(np.arange(length) + depth, boundaries[1:][sequence] - 1)
    return row.tokens[torch.from_numpy(places).to(row.tokens.device)]


def predicted(row: RowPart, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which of ``row.row.rows`` a layer predicts, and from where.  i64[K] each

    It predicts a token from the place depth + 1 before it, if that is in the same sequence.
    """
    places = row.micro_batch.positions[row.row.rows.cpu().numpy()] if len(row.row.rows) else np.zeros(0, np.int32)
    numbers = torch.from_numpy(np.flatnonzero(places > depth)).to(row.tokens.device)
    return numbers, row.row.rows[numbers] - 1 - depth


def check_rows(row: RowPart) -> None:
    """Assert that the part is a whole row, in which a token's successor is the next one (refusals.py)."""
    assert row.kept is None and row.shared is None
