"""Selects the trained parameters of the policy: learner.freeze and learner.train_only, by Hugging Face names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Final

from asyncrl.backends import huggingface
from asyncrl.backends.optimizer_settings import OptimizerSettings
from asyncrl.backends.weight_map import weight_map
from asyncrl.config.adapter import RunConfig
from asyncrl.errors import ConfigError

_INDEXER: Final = ".self_attn.indexer."
"""Part of the names of what chooses tokens (families/shape.py Indexer), which has no gradients."""


def is_trained(name: str, *, freeze: Sequence[str], train_only: Sequence[str]) -> bool:
    """Return whether a parameter is trained. Patterns are regular expressions, searched anywhere in the name."""
    if _INDEXER in name:
        return False
    is_chosen = not train_only or any(re.search(pattern, name) for pattern in train_only)
    return is_chosen and not any(re.search(pattern, name) for pattern in freeze)


def trains(settings: OptimizerSettings, name: str) -> bool:
    """Return whether a parameter itself is trained, not only an adapter of it."""
    return settings.lora is None and is_trained(name, freeze=settings.freeze, train_only=settings.train_only)


def check(run: RunConfig, *, are_fused: bool) -> None:
    """Refuse patterns that match nothing or leave nothing to train. Raises ConfigError.

    are_fused  whether the backend fuses several tensors of the folder into one parameter, so that all of them train or
               none; the experts of a layer are fused in every backend
    """
    learner = run.learner
    if not (learner.freeze or learner.train_only or learner.train_vision):
        return
    shape = huggingface.policy_shape(run)
    if learner.train_vision and not shape.vision:
        raise ConfigError("learner.train_vision: the model has no vision tower; remove the key")
    maps = weight_map(shape)
    maps = [entry for entry in maps if not entry.is_router_bias]
    names = [name for entry in maps for name in entry.huggingface]
    for key, patterns in (("freeze", learner.freeze), ("train_only", learner.train_only)):
        for pattern in patterns:
            if not any(re.search(pattern, name) for name in names):
                near = difflib.get_close_matches(pattern, names, 1, cutoff=0.3) or names[:1]
                raise ConfigError(
                    f"learner.{key}: {pattern!r} matches no parameter of the model; names look like {near[0]}"
                )
    trained = {name for name in names if is_trained(name, freeze=learner.frozen, train_only=learner.train_only)}
    if not trained:
        raise ConfigError("learner.freeze and learner.train_only leave no parameter to train")
    for pattern in learner.train_only:
        if not any(re.search(pattern, name) for name in trained):
            raise ConfigError(
                f"learner.train_only: {pattern!r} trains nothing, as learner.freeze freezes all its matches; remove "
                "one, or set learner.train_vision = true for the vision tower"
            )
    for entry in maps:
        fused = entry.huggingface
        if (are_fused or entry.is_of_experts) and 0 < len(trained.intersection(fused)) < len(fused):
            listed = ", ".join(fused) if len(fused) <= 3 else f"{fused[0]} to {fused[-1]}"
            where = "every" if entry.is_of_experts else "the megatron"
            remedy = "" if entry.is_of_experts else ', or use learner.backend = "reference"'
            raise ConfigError(
                f"learner.freeze, train_only: {listed} are one parameter in {where} backend; freeze all of them or "
                f"none{remedy}"
            )
