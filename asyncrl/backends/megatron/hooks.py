"""A user's code at three moments of every rank of the Megatron learner (learner.options.hooks).

As slime's --custom-megatron-init-path, --custom-megatron-before-log-prob-hook-path and
--custom-megatron-before-train-step-hook-path. Test: tests/unit/backends/megatron/test_own_code.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from asyncrl.config import plugins


class MegatronHooks:
    """Derive from this class and name yours in the run file: hooks = "package.module:MyHooks". Each rank makes one.

    ``stages`` are a rank's parts of Megatron's GPTModel: one, or several with virtual_pipeline. An error raised here
    is one of the step's: alone, a rank fails the groups of the batch and goes on; several ranks end.
    """

    def after_start(self, models: Mapping[str, Sequence[torch.nn.Module]]) -> None:
        """Called once, when all models ("policy", "reference", ...) are loaded, before a checkpoint is restored."""

    def before_forward(self, model: str, stages: Sequence[torch.nn.Module]) -> None:
        """Called before the passes that compute logprobs or values of a batch without gradients."""

    def before_step(
        self, model: str, stages: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        """Called before every optimizer step of a trained model, before its forward passes.

        optimizers  torch's AdamW of this rank's weights, and of its experts if they are distributed differently
        """


def load_hooks(name: str) -> MegatronHooks:
    """Return an object of the class that learner.options.hooks names. Raises ConfigError."""
    if not name:
        return MegatronHooks()
    where = "learner.options.hooks"
    made: MegatronHooks = plugins.make(
        plugins.load_subclass(name, where=where, kind=MegatronHooks), where=where, name=name
    )
    return made
