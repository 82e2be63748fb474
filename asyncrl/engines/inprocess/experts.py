"""Records which experts each token is routed to in transformers' layers, so the learner can replay the routing
(messages/routing.py)."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.messages.routing import dtype_for, unrouted_rows


class ExpertRecorder:
    """Hooks every mixture of a model and reads its inputs: hidden states [n, H], experts [n, k], scores [n, k]."""

    def __init__(self, model: Any) -> None:
        self._layers = len(model.model.layers)
        self._chosen: dict[int, torch.Tensor] = {}
        sizes = []
        for number, layer in enumerate(model.model.layers):
            if (experts := getattr(layer.mlp, "experts", None)) is not None:
                experts.register_forward_pre_hook(partial(self._note, number))
                sizes.append(experts.num_experts)
        self._dtype = dtype_for(max(sizes))

    def _note(self, layer: int, _module: Any, arguments: tuple[torch.Tensor, ...]) -> None:
        self._chosen[layer] = arguments[1]

    def taken(self, rows: int) -> NDArray[Any]:
        """Return the experts of the last pass, which had ``rows`` rows of n tokens: [rows, n, layers, k]."""
        some = next(iter(self._chosen.values()))
        found = unrouted_rows(len(some), like=np.empty((0, self._layers, some.shape[1]), self._dtype))
        for layer, chosen in self._chosen.items():
            found[:, layer] = chosen.cpu().numpy()
        self._chosen.clear()
        return found.reshape(rows, -1, *found.shape[1:])
