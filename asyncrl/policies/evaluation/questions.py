"""A data set of an evaluation as it is asked: its prompts, how they are sampled, and what is measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.messages import SamplingParams
from asyncrl.policies.evaluation.results import Measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One prompt.  tokens: i32[T]"""

    prompt: str
    tokens: NDArray[np.int32]
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSet:
    """A data set by the name that its metrics have."""

    name: str
    questions: Sequence[Question]
    sampling: SamplingParams
    measured: Measured
