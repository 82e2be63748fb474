"""Which split of N GPUs between learner and engines trains the most tokens, and under which staleness bound."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from asyncrl.config.layout import Layout
from asyncrl.planning.simulation import GroupLengths, Ideal, Plan, Reached, Timing

BOUNDS: Final = (1, 2, 4, 8)
"""Staleness bounds that are tried in addition to the run's own."""
ENOUGH: Final = 0.97
"""A lower bound is preferred if it reaches this share of the best rate: fresher data needs less correction."""
STEPS: Final = 12
"""Counted steps of a simulated run."""
MOST_EVENTS: Final = 400_000
"""Maximum number of answers in one simulated run; if there are more, fewer steps are counted."""


@dataclass(frozen=True, slots=True, order=True)
class Split:
    """
    copies   training copies of the model
    engines  rollout workers with GPUs of their own
    beside   rollout workers on the learner's GPUs
    """

    copies: int
    engines: int
    beside: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """GPUs per training copy of the model, and per engine."""

    copy: int
    engine: int

    @classmethod
    def of(cls, layout: Layout, *, gpus_per_engine: int) -> Units:
        """Return the units of the smallest learner with this layout.

        A process on CPUs counts as one GPU. If copies of the model share experts, all copies that share them count as
        one.
        """
        one = layout.ranks // layout.data_parallel
        return cls(
            copy=math.lcm(one, layout.expert * layout.expert_tensor * layout.pipeline), engine=max(1, gpus_per_engine)
        )

    def shown(self, split: Split) -> str:
        """Return the GPUs of learner and engines, as 1+2; after a slash, the learner's that have engines too."""
        gpus = f"{split.copies * self.copy}+{split.engines * self.engine}"
        return f"{gpus}/{split.beside * self.engine}" if split.beside else gpus

    def splits(self, gpus: int, *, shares: bool = False) -> list[Split]:
        """Return all splits that leave less than one engine's GPUs unused. Raises ValueError if nothing fits.

        shares: also those with as many engines on the learner's GPUs as have room for one on each
        """
        found = [
            Split(copies, (gpus - copies * self.copy) // self.engine)
            for copies in range(1, (gpus - self.engine) // self.copy + 1)
        ]
        if shares:
            found += [
                Split(copies, (gpus - copies * self.copy) // self.engine, beside=copies * self.copy // self.engine)
                for copies in range(1, gpus // self.copy + 1)
                if copies * self.copy >= self.engine
            ]
        if not found:
            raise ValueError(
                f"there is no room for a learner of {self.copy} and an engine of {self.engine}; give "
                f"--gpus {self.copy + self.engine} at least"
            )
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    split: Split
    max_staleness: int
    reached: Reached

    @property
    def rate(self) -> float:
        return self.reached.tokens_per_second


def likely(splits: Sequence[Split], plan: Plan, timing: Timing, lengths: Sequence[Sequence[int]]) -> list[Split]:
    """Return the splits around the one where engines and learner are equally fast by arithmetic; only these need a
    simulation."""
    tokens = sum(map(sum, lengths)) / len(lengths)
    batch = tokens * plan.groups_per_batch
    packed = round(batch + plan.prompt_tokens * plan.group_size * plan.groups_per_batch)
    window = (plan.bound + 1) * plan.groups_per_batch * plan.group_size
    context = context_of(lengths, prompt_tokens=plan.prompt_tokens)

    def rate(split: Split) -> float:
        def sampled(its: Timing) -> float:  # by an engine alone
            running = max(1.0, min(its.capacity, window / (split.engines + split.beside)))
            return plan.kept * running / its.decode_step(running, running * context)

        own, beside = split.engines * sampled(timing), split.beside * sampled(timing.beside)
        slowdown = timing.train_beside if split.beside else 1.0
        training = slowdown * timing.train_step(packed, machines=split.copies)
        meanwhile = training * (own + beside / timing.decode_beside)
        return batch / (training + max(0.0, batch - meanwhile) / (own + beside))

    def near_best(kind: Sequence[Split]) -> Sequence[Split]:
        best = max(range(len(kind)), key=lambda place: rate(kind[place]), default=0)
        return kind[max(0, best - 2) : best + 3]

    return [*near_best([one for one in splits if not one.beside]), *near_best([one for one in splits if one.beside])]


def context_of(lengths: Iterable[Sequence[int]], *, prompt_tokens: float) -> float:
    """Return the tokens of a sequence that runs, on average, its prompt included. Long ones run longer."""
    each = [length for group in lengths for length in group]
    return prompt_tokens + sum(length * length for length in each) / (2 * sum(each))


def drawn(lengths: Sequence[Sequence[int]], *, group_size: int, seed: int) -> GroupLengths:
    """Draw groups from the measured ones, with replacement; the answers to one prompt stay together."""
    picks = random.Random(seed)
    chosen: dict[int, list[int]] = {}

    def of(group_id: int) -> list[int]:
        if group_id not in chosen:
            group = list(picks.choice(lengths))
            chosen[group_id] = (group * -(-group_size // len(group)))[:group_size]
        return chosen[group_id]

    return of


def predict(
    plan: Plan, timing: Timing, lengths: Sequence[Sequence[int]], *, splits: Iterable[Split], bounds: Iterable[int]
) -> list[Predicted]:
    """Simulate each split under each bound. ``plan`` is the run; its split, bound and steps are replaced here."""
    found = []
    for split, bound in itertools.product(splits, bounds):
        asked = dataclasses.replace(
            plan,
            workers=split.engines + split.beside,
            beside=split.beside,
            learner_machines=split.copies,
            max_staleness=bound,
            warmup=0,
            steps=0,
        )
        per_step = plan.groups_per_batch * plan.group_size
        warmup = 2 * (asked.bound + 1)
        counted = max(3, min(STEPS, MOST_EVENTS // per_step - warmup))
        asked = dataclasses.replace(asked, warmup=warmup, steps=warmup + counted)
        of_group = drawn(lengths, group_size=plan.group_size, seed=plan.seed)
        found.append(Predicted(split=split, max_staleness=bound, reached=Ideal(asked, timing, of_group).run()))
    return found


def recommended(found: Sequence[Predicted]) -> Predicted:
    """Return the prediction with the lowest bound, then the highest rate, among those that reach ENOUGH of the best."""
    most = max(one.rate for one in found)
    enough = [one for one in found if one.rate >= ENOUGH * most]
    return min(enough, key=lambda one: (one.max_staleness, -one.rate))
