"""A failed step or scoring changes nothing on any rank, and does not affect the next step."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.backends.port import Backend
from asyncrl.errors import AsyncRLError, StepFailed
from asyncrl.policies.batching.packing import MicroBatch
from tests.harness.backends import (
    LEARNING_RATE,
    RANKS,
    distance,
    documents,
    num_ranks,
    shares,
    started,
    tiny_model,
    weights,
)

BUILT_IN = ("reference", "megatron-1", "megatron-2", "megatron-tp2", "megatron-cp2", "megatron-pp2")
PARAMETERS = [pytest.param(kind, marks=RANKS if num_ranks(kind) > 1 else ()) for kind in BUILT_IN]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def broken(kind: str, number: int, *, max_tokens: int) -> list[list[MicroBatch]]:
    """Return a batch in which document ``number`` cannot be trained.

    Its last token has no embedding, which only one rank notices. In layouts where other ranks would wait for that rank,
    the micro-batch also lacks most of its staleness values.
    """
    made = documents(3)
    tokens = np.array(made[number].tokens)
    tokens[-1] = 10**6
    made[number] = dataclasses.replace(made[number], tokens=tokens)
    cut = shares(kind, made, max_tokens=max_tokens)
    if kind not in ("megatron-tp2", "megatron-cp2"):
        return cut
    return [
        [dataclasses.replace(m, staleness=m.staleness[:1]) if number in m.documents else m for m in share]
        for share in cut
    ]


def failing(backend: Backend, kind: str, *, max_tokens: int) -> list[Exception]:
    """Return the errors of a step and a scoring with a bad document at several positions."""
    raised: list[Exception] = []
    for number in (0, 1, 7):
        cut = broken(kind, number, max_tokens=max_tokens)
        for call in (
            lambda cut: backend.step(cut, learning_rate=LEARNING_RATE),
            backend.score,
        ):
            with pytest.raises(Exception) as caught:  # noqa: PT011 - whatever torch raises
                call(cut)
            raised.append(caught.value)
    return raised


@pytest.mark.parametrize("kind", PARAMETERS)
def test_what_fails_in_the_midst_leaves_weights_and_optimizer_as_they_were(kind: str, folder: Path) -> None:
    def trained(*, with_failures: bool) -> Any:
        with started(kind, folder) as backend:
            for step in range(3):
                if with_failures:  # also before the first step, in which ranks learn what to wait for
                    raised = failing(backend, kind, max_tokens=(1000, 40)[step % 2])
                    assert all(isinstance(error, StepFailed) or not isinstance(error, AsyncRLError) for error in raised)
                backend.step(shares(kind, documents(step), max_tokens=40), learning_rate=LEARNING_RATE)
            return weights(backend)

    assert distance(trained(with_failures=False), trained(with_failures=True)) == 0.0
