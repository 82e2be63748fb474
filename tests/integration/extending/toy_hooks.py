"""Hooks into Megatron: the output layer starts at half its size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from asyncrl.backends.megatron.hooks import MegatronHooks


class HalveHead(MegatronHooks):
    """learner.options.hooks = "tests.integration.extending.toy_hooks:HalveHead" """

    def after_start(self, models: Mapping[str, Sequence[torch.nn.Module]]) -> None:
        for stage in models["policy"]:
            for name, parameter in stage.named_parameters():
                if name == "output_layer.weight":
                    parameter.data.mul_(0.5)
