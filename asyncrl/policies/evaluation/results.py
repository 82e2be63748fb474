"""The numbers of one evaluation of one data set, from what was answered to each of its prompts. Pure.

Metrics by name, which the caller puts under evaluation/DATASET/:

    mean@n                  reward, mean over prompts and their n answers
    pass@k, pass^k          for k = 1, 2, 4, ..., n
    majority@n              where every prompt has a label
    METRIC/low, METRIC/high the bounds of 95 % of bootstrap resamples of the prompts
    length_mean             tokens of an answer
    truncated_fraction      answers that were cut at max_new_tokens
    prompts, missing        that are to be answered; that were not: they are in no mean

Prompts with tags give the same again under DATASET[TAG].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from asyncrl.policies.evaluation.bootstrap import interval
from asyncrl.policies.evaluation.estimators import counts_of_k, majority, pass_all_k, pass_at_k


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """The n answers to one prompt: their rewards, what each comes down to (estimators.majority), length in tokens, and
    whether it was cut off."""

    rewards: tuple[float, ...]
    votes: tuple[str, ...]
    lengths: tuple[int, ...]
    truncated: tuple[bool, ...]
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What is asked of one data set.

    num_prompts   its prompts
    num_samples   answers to each
    k             of pass@k and pass^k; empty: estimators.counts_of_k
    solved_at     an answer with at least this reward is solved
    has_labels    whether every prompt has one
    tags          of each tag, how many prompts have it
    """

    num_prompts: int
    num_samples: int
    k: tuple[int, ...] = ()
    solved_at: float = 1.0
    has_labels: bool = False
    tags: Mapping[str, int] = field(default_factory=dict)


def metrics(name: str, measured: Measured, answered: Iterable[Answered], *, seed: int) -> dict[str, float]:
    """Of data set ``name`` and of each of its tags; ``seed`` of the bootstrap."""
    answered = list(answered)
    found = {f"{name}/{key}": value for key, value in _metrics(measured, answered, seed=seed).items()}
    for tag, num_prompts in sorted(measured.tags.items()):
        ours = [one for one in answered if tag in one.tags]
        part = dataclasses.replace(measured, num_prompts=num_prompts, tags={})
        found |= {f"{name}[{tag}]/{key}": value for key, value in _metrics(part, ours, seed=seed).items()}
    return found


def metric_names(num_samples: int, *, k: Sequence[int] = (), has_labels: bool) -> list[str]:
    """The means that a data set with so many answers to each prompt is reported with."""
    counts = k or counts_of_k(num_samples)
    names = [f"mean@{num_samples}", *(f"pass@{k}" for k in counts), *(f"pass^{k}" for k in counts)]
    return [*names, *([f"majority@{num_samples}"] if has_labels and num_samples > 1 else [])]


def _metrics(measured: Measured, answered: Sequence[Answered], *, seed: int) -> dict[str, float]:
    found = {"prompts": float(measured.num_prompts), "missing": float(measured.num_prompts - len(answered))}
    if not answered:
        return found
    names = metric_names(measured.num_samples, k=measured.k, has_labels=measured.has_labels)
    values = np.array([_of_prompt(measured, one) for one in answered], dtype=np.float64)
    low, high = interval(values, seed=seed)
    for index, name in enumerate(names):
        found[name] = float(values[:, index].mean())
        found[f"{name}/low"], found[f"{name}/high"] = float(low[index]), float(high[index])
    lengths = [length for one in answered for length in one.lengths]
    truncated = [cut for one in answered for cut in one.truncated]
    found["length_mean"] = sum(lengths) / len(lengths)
    found["truncated_fraction"] = sum(truncated) / len(truncated)
    return found


def _of_prompt(measured: Measured, one: Answered) -> list[float]:
    """In the order of ``metric_names``."""
    n, solved = measured.num_samples, [reward >= measured.solved_at for reward in one.rewards]
    if len(solved) != n:
        raise ValueError(f"a prompt has {len(solved)} answers, not {n}")
    counts = measured.k or counts_of_k(n)
    values = [sum(one.rewards) / n]
    values += [pass_at_k(n, sum(solved), k) for k in counts]
    values += [pass_all_k(n, sum(solved), k) for k in counts]
    return [*values, *([majority(one.votes, solved)] if measured.has_labels and n > 1 else [])]
