"""Sequences that begin with the same tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from asyncrl.policies.batching.packing import TrainingSequence
from tests.harness.backends import VOCABULARY, sequence

Tokens = NDArray[np.int32]


def random_tree(seed: int, *, num_sequences: int, longest: int = 12) -> list[Tokens]:
    """Return samples of prompts, turns that go on from earlier ones, copies, beginnings, and sequences alone."""
    random = np.random.default_rng(seed)

    def new(at_least: int = 1) -> Tokens:
        return random.integers(0, VOCABULARY, random.integers(at_least, longest + 1)).astype(np.int32)

    made = [new(2)]
    while len(made) < num_sequences:
        earlier = made[random.integers(len(made))]
        cut = int(random.integers(2, len(earlier) + 1)) if len(earlier) > 2 else len(earlier)
        kinds = (
            new(2),  # a sequence alone
            np.concatenate([earlier, new()]),  # a turn that extends it
            np.concatenate([earlier[:cut], new()]),  # a branch
            earlier,  # the same sample
            earlier[:cut],  # its beginning
        )
        made.append(kinds[random.choice(5, p=[0.1, 0.2, 0.5, 0.1, 0.1])])
    return [made[i] for i in random.permutation(len(made))]


def trained(tokens: Sequence[Tokens], *, seed: int = 0) -> list[TrainingSequence]:
    """Return sequences with values of their own for every token. About the second half of each is trained."""
    return [
        dataclasses.replace(sequence(len(own), seed=100 * seed + i, num_sequences=len(tokens)), tokens=own)
        for i, own in enumerate(tokens)
    ]


def trees(seed: int = 0, *, num_sequences: int = 12) -> list[TrainingSequence]:
    return trained(random_tree(seed, num_sequences=num_sequences), seed=seed)
