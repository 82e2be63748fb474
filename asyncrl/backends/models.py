"""The models a learner holds: the policy and, by name, what an algorithm needs beside it.

A "critic" is trained, a "reference" or "teacher" is frozen. Frozen models are read from their folders at every start;
what is trained is in the checkpoint, the policy in its backend folder itself and any other in a subfolder of its name.
Tests: tests/test_backend_models.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from asyncrl.backends.optimizer_settings import OptimizerSettings
from asyncrl.errors import BackendError, CheckpointError, ConfigError
from asyncrl.policies.objective import Objective

T = TypeVar("T")

POLICY: Final = "policy"
VALUE_HEAD: Final = "value_head.weight"

Head = Literal["logprobs", "values"]
"""logprobs: the output layer over the vocabulary. values: one number per token instead, H -> 1, from 0 at the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuxiliaryModel:
    """A model by its Hugging Face folder. Without ``objective`` and ``optimizer`` it is frozen.

    Of a folder with an output layer a "values" model takes everything but that.
    """

    path: Path
    head: Head = "logprobs"
    objective: Objective | None = None
    optimizer: OptimizerSettings | None = None

    @property
    def is_trained(self) -> bool:
        return self.objective is not None


def with_policy(policy: AuxiliaryModel, auxiliary: Mapping[str, AuxiliaryModel]) -> dict[str, AuxiliaryModel]:
    """All models by name, the policy first. Raises ConfigError for a model that lacks tokens of the policy's."""
    for name, model in auxiliary.items():
        if name == POLICY or (model.objective is None) != (model.optimizer is None):
            raise BackendError(f"auxiliary model {name!r} needs a name of its own, and an optimizer if an objective")
        if model.path != policy.path:
            _require_tokens(policy.path, model.path, name=name)
    return {POLICY: policy, **auxiliary}


def _require_tokens(policy: Path, other: Path, *, name: str) -> None:
    """An embedding for each token id of the policy's. More do no harm: vocabularies are padded differently.

    Whether the ids mean the same words is for whoever has the tokenizers.
    """
    needed, found = _vocabulary_size(policy, POLICY), _vocabulary_size(other, name)
    if found < needed:
        raise ConfigError(
            f"{where(name)}: {other} has a vocabulary of {found} tokens, fewer than the policy's {needed} (model.path "
            f"{policy}); take a model of the same family"
        )


def _vocabulary_size(folder: Path, name: str) -> int:
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        return int(config["vocab_size"] if "vocab_size" in config else config["text_config"]["vocab_size"])
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{where(name)}: {folder} is no Hugging Face model folder: {error}") from None


def where(name: str) -> str:
    """What to call a model's folder to whoever wrote the run file."""
    return "model.path" if name == POLICY else f"{name}.path"


def find(models: Mapping[str, T], name: str, *, doing: str) -> T:
    """The model of that name. Raises BackendError that says which there are."""
    if name not in models:
        raise BackendError(f"{doing}: there is no model {name!r} for this; there is {', '.join(models)}")
    return models[name]


def saved_in(folder: Path, name: str) -> Path:
    """Where the checkpoint in ``folder`` has a trained model."""
    return folder if name == POLICY else folder / name


def require_saved(folder: Path, names: Iterable[str]) -> None:
    """Raises CheckpointError, before anything is restored, when the checkpoint has not all the trained models."""
    for name in names:
        if name != POLICY and not saved_in(folder, name).exists():
            raise CheckpointError(
                f"{folder}: has no {name}: a run without one wrote it. Resume with that run's [algorithm], or begin a "
                "new run from its last weights"
            )
