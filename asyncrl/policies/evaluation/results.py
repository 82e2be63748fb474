"""The metrics of one evaluation of one data set, from the answers to each of its prompts. Pure.

The caller puts these metrics under evaluation/DATASET/:

    mean@n                  reward, mean over prompts and their n answers
    pass@k, pass^k          for k = 1, 2, 4, ..., n
    majority@n              if every prompt has a label
    METRIC/low, METRIC/high bounds of 95 % of bootstrap resamples of the prompts
    length_mean             tokens per answer
    truncated_fraction      share of answers that were cut at max_new_tokens
    prompts, missing        number of prompts; number of unanswered prompts, which are left out of all means

For prompts with tags, the same metrics are repeated under DATASET[TAG].
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
    """The n answers to one prompt.

    votes      normalized answers (estimators.majority)
    lengths    in tokens
    truncated  whether each answer was cut off
    """

    rewards: tuple[float, ...]
    votes: tuple[str, ...]
    lengths: tuple[int, ...]
    truncated: tuple[bool, ...]
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What is measured on one data set.

    num_prompts   number of prompts
    num_samples   answers per prompt
    k             values of k for pass@k and pass^k; empty: estimators.counts_of_k
    solved_at     an answer with at least this reward is solved
    has_labels    whether every prompt has a label
    tags          number of prompts with each tag
    """

    num_prompts: int
    num_samples: int
    k: tuple[int, ...] = ()
    solved_at: float = 1.0
    has_labels: bool = False
    tags: Mapping[str, int] = field(default_factory=dict)


def metrics(name: str, measured: Measured, answered: Iterable[Answered], *, seed: int) -> dict[str, float]:
    """Return the metrics of data set ``name`` and of each of its tags; ``seed`` seeds the bootstrap."""
    answered = list(answered)
    found = {f"{name}/{key}": value for key, value in _metrics(measured, answered, seed=seed).items()}
    for tag, num_prompts in sorted(measured.tags.items()):
        ours = [one for one in answered if tag in one.tags]
        part = dataclasses.replace(measured, num_prompts=num_prompts, tags={})
        found |= {f"{name}[{tag}]/{key}": value for key, value in _metrics(part, ours, seed=seed).items()}
    return found


def metric_names(num_samples: int, *, k: Sequence[int] = (), has_labels: bool) -> list[str]:
    """Return the names of the means that are reported for ``num_samples`` answers per prompt."""
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
    """Return the values of one prompt, in the order of ``metric_names``."""
    n, solved = measured.num_samples, [reward >= measured.solved_at for reward in one.rewards]
    if len(solved) != n:
        raise ValueError(f"a prompt has {len(solved)} answers, not {n}")
    counts = measured.k or counts_of_k(n)
    values = [sum(one.rewards) / n]
    values += [pass_at_k(n, sum(solved), k) for k in counts]
    values += [pass_all_k(n, sum(solved), k) for k in counts]
    return [*values, *([majority(one.votes, solved)] if measured.has_labels and n > 1 else [])]
