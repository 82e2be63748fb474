"""Reads from a server's replies which experts each token was routed to (messages/routing.py). Pure: does no I/O.

The server keeps the experts of a token alongside its KV cache. So a token sampled before a weight load keeps its
original experts, and a prefix found in the cache has the experts that its keys were computed with. The server reports
experts only when an answer is finished. If another engine continues an unfinished answer, the experts of the prefix are
computed again.
Tests: tests/unit/engines/sglang/test_reply.py, tests/integration/sglang/test_transfers.py.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from asyncrl.errors import ConfigError, EngineError
from asyncrl.messages.routing import ExpertArray, dtype_for, unrouted

OPTION: Final = "enable-return-routed-experts"
"""Server option that enables this."""

_NUM_EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """Experts of a model: experts per layer, number of layers (with and without experts), experts per token."""

    num_experts: int
    num_layers: int
    per_token: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ExpertShape:
        """Read the shape from config.json. Raises ConfigError for a model without experts."""
        num_experts = next((config[name] for name in _NUM_EXPERTS if config.get(name)), 0)
        layers, per_token = config.get("num_hidden_layers", 0), config.get("num_experts_per_tok", 0)
        if not (num_experts and layers and per_token):
            raise ConfigError("rollout.routing_replay: config.json names no experts")
        return cls(num_experts=int(num_experts), num_layers=int(layers), per_token=int(per_token))

    def read(self, text: str, *, num_tokens: int) -> ExpertArray:
        """Return [num_tokens, layers, per_token] for prompt and answer, the last token unrouted. Raises EngineError.

        text  base64 of int32 [num_tokens - 1, layers, per_token]

        The server sends zeros where no router chose: for dense layers, and for layers of other pipeline stages. With
        one expert per token, these zeros look like expert 0; the learner ignores the experts of dense layers.
        """
        try:
            told = np.frombuffer(base64.b64decode(text, validate=True), "<i4")
            told = told.reshape(-1, self.num_layers, self.per_token)[: num_tokens - 1]
        except (ValueError, binascii.Error) as error:
            raise EngineError(f"the server's routed experts are not those of this model: {error}") from error
        dtype = dtype_for(self.num_experts)
        found = np.full((num_tokens, self.num_layers, self.per_token), unrouted(np.empty(0, dtype)), dtype)
        is_chosen = (told >= 0).all(-1) & (told < self.num_experts).all(-1)
        if self.per_token > 1:
            is_chosen &= told.any(-1)
        found[: len(told)][is_chosen] = told[is_chosen]
        return found
