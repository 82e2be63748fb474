"""A data set of an evaluation: its prompts, how they are sampled, and what is measured."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.messages import SamplingParams
from asyncrl.messages.images import ImageRef
from asyncrl.policies.evaluation.results import Measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One prompt.  tokens: i32[T]"""

    prompt: str
    tokens: NDArray[np.int32]
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    messages: tuple[dict[str, Any], ...] = ()
    images: tuple[ImageRef, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSet:
    """A data set, named as in its metrics.

    judge     description of its reward, without secrets
    oddities  one line for each thing about its prompts that is hardly ever meant
    """

    name: str
    questions: Sequence[Question]
    sampling: SamplingParams
    measured: Measured
    judge: str = ""
    oddities: tuple[str, ...] = ()


def digest(sets: Sequence[EvaluationSet]) -> str:
    """Return 32 hex digits that identify the questions and the judge; evaluations with equal digests are comparable."""
    found = hashlib.sha256()
    for its in sets:
        measured = dataclasses.replace(its.measured, tags=dict(sorted(its.measured.tags.items())))
        found.update(repr((its.name, its.sampling, measured, its.judge)).encode())
        for one in its.questions:
            asked = (one.prompt, one.tokens.tolist(), one.label, sorted(one.metadata.items()), one.tags)
            found.update(repr(asked).encode(errors="surrogatepass"))
            found.update("".join(image.digest for image in one.images).encode())
    return found.hexdigest()[:32]
