"""The learner's models by name: the policy, and the algorithm's auxiliary models.

A "critic" is trained; a "reference" or "teacher" is frozen. Frozen models are read from their folders at every start.
Trained models, and a reference that is refreshed, are in the checkpoint: the policy in the backend folder itself,
others in a subfolder of their name.
Tests: tests/contracts/test_backend_models.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from asyncrl.backends.optimizer_settings import OptimizerSettings
from asyncrl.data.model_folder import decoder_config
from asyncrl.errors import BackendError, CheckpointError, ConfigError
from asyncrl.policies.algorithms.objective import Objective

T = TypeVar("T")

POLICY: Final = "policy"
VALUE_HEAD: Final = "value_head.weight"
INDEX: Final = "backend.json"
"""File of a trained model's checkpoint, written last: a folder without it is no checkpoint."""

Head = Literal["logprobs", "values"]
"""logprobs: output layer over the vocabulary. values: a value head, H -> 1, initialised to zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuxiliaryModel:
    """A model in a Hugging Face folder. It is frozen unless it has an ``objective`` and an ``optimizer``.

    A "values" model ignores the folder's output layer.

    is_refreshed  whether a frozen model becomes the policy now and then, so that checkpoints hold it
    megatron      fields of Megatron's TransformerConfig, over those of all models
    """

    path: Path
    head: Head = "logprobs"
    objective: Objective | None = None
    optimizer: OptimizerSettings | None = None
    is_refreshed: bool = False
    megatron: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_saved(self) -> bool:
        """Whether checkpoints hold the model: its weights are not those of its folder."""
        return self.is_trained or self.is_refreshed

    @property
    def is_trained(self) -> bool:
        return self.objective is not None

    def is_base_of(self, policy: AuxiliaryModel) -> bool:
        """Whether this is the policy without its adapters, so it need not be loaded a second time."""
        has_adapters = policy.optimizer is not None and policy.optimizer.lora is not None
        return (
            has_adapters
            and not self.is_saved
            and not self.megatron
            and (self.path, self.head) == (policy.path, policy.head)
        )


def with_policy(policy: AuxiliaryModel, auxiliary: Mapping[str, AuxiliaryModel]) -> dict[str, AuxiliaryModel]:
    """Return all models by name, the policy first. Raises ConfigError if a model lacks some of the policy's tokens."""
    for name, model in auxiliary.items():
        if name == POLICY or (model.objective is None) != (model.optimizer is None):
            raise BackendError(
                f"auxiliary model {name!r}: the name must be unique, and an objective and an optimizer go together"
            )
        if model.path != policy.path:
            _require_tokens(policy.path, model.path, name=name)
    return {POLICY: policy, **auxiliary}


def _require_tokens(policy: Path, other: Path, *, name: str) -> None:
    """Raise ConfigError unless ``other`` has an embedding for each of the policy's token ids.

    Extra embeddings are harmless (vocabularies are padded differently). Does not check that ids mean the same tokens.
    """
    needed, found = _vocabulary_size(policy, POLICY), _vocabulary_size(other, name)
    if found < needed:
        raise ConfigError(
            f"{where(name)}: {other} has a vocabulary of {found} tokens, fewer than the policy's {needed} (model.path "
            f"{policy}); use a model of the same family"
        )


def _vocabulary_size(folder: Path, name: str) -> int:
    try:
        return int(decoder_config(json.loads((folder / "config.json").read_text()))["vocab_size"])
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{where(name)}: {folder} is not a Hugging Face model folder: {error}") from None


def where(name: str) -> str:
    """Return the run file's key for a model's folder."""
    return "model.path" if name == POLICY else f"{name}.path"


def find(models: Mapping[str, T], name: str, *, doing: str) -> T:
    """Return the model with that name. Raises BackendError, which lists the available models."""
    if name not in models:
        raise BackendError(f"{doing}: no model {name!r}; available: {', '.join(models)}")
    return models[name]


def saved_in(folder: Path, name: str) -> Path:
    """Return the folder of a trained model in the checkpoint at ``folder``."""
    return folder if name == POLICY else folder / name


def require_saved(folder: Path, names: Iterable[str]) -> None:
    """Raise CheckpointError if the checkpoint lacks a trained model. Called before anything is restored."""
    for name in names:
        if name != POLICY and not saved_in(folder, name).exists():
            raise CheckpointError(
                f"{folder}: has no {name}; it was written by a run without one. Resume with that run's [algorithm], or "
                "start a new run from its last weights"
            )
