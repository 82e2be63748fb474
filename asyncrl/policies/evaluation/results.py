"""The metrics of one evaluation of one data set, from the answers to each of its prompts. Pure.

The caller puts these metrics under evaluation/DATASET/:

    mean@n                  reward, mean over prompts and their n answers
    pass@k, pass^k          for k = 1, 2, 4, ..., n
    majority@n              if every prompt has a label
    METRIC/low, METRIC/high bounds of 95 % of bootstrap resamples of the prompts
    length_mean             tokens per answer
    truncated_fraction      share of answers that were cut at max_new_tokens
    NAME, own_failed        of evaluation.datasets.metrics; 1 if it raised
    prompts, missing        number of prompts; number of unanswered prompts, which are left out of all means

For prompts with tags, the same metrics are repeated under DATASET[TAG].

An answer is solved or not. With c of n answers solved, every subset of k answers is equally likely, so the share of
matching subsets is an unbiased estimate of the probability for k fresh answers:

    pass@k     at least one of k is solved     1 - C(n - c, k) / C(n, k)      arXiv:2107.03374, equation 1
    pass^k     all k are solved                    C(c, k) / C(n, k)          arXiv:2406.12045, section 3
    majority@n the most frequent of the n answers is solved

Tests: tests/unit/policies/test_evaluation.py, against every subset enumerated.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.config import plugins

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """The n answers to one prompt.

    votes      normalized answers (majority)
    lengths    in tokens
    truncated  whether each answer was cut off
    """

    rewards: tuple[float, ...]
    votes: tuple[str, ...]
    lengths: tuple[int, ...]
    truncated: tuple[bool, ...]
    tags: tuple[str, ...] = ()


OwnMetrics = Callable[[Sequence[Answered]], Mapping[str, float]]
"""A function of the user's own: from all answers of a data set (or of one tag) to metrics by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What is measured on one data set.

    num_prompts   number of prompts
    num_samples   answers per prompt
    k             values of k for pass@k and pass^k; empty: counts_of_k
    solved_at     an answer with at least this reward is solved
    has_labels    whether every prompt has a label
    tags          number of prompts with each tag
    own           further metrics of the user's own
    """

    num_prompts: int
    num_samples: int
    k: tuple[int, ...] = ()
    solved_at: float = 1.0
    has_labels: bool = False
    tags: Mapping[str, int] = field(default_factory=dict)
    own: OwnMetrics | None = None


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
    return found if measured.own is None else found | _own_metrics(measured.own, answered, taken=found)


def _own_metrics(function: OwnMetrics, answered: Sequence[Answered], *, taken: Mapping[str, float]) -> dict[str, float]:
    """Return the user's metrics; {"own_failed": 1} with a warning if their function raises, or one is in ``taken``."""
    try:
        with plugins.contain_exits():
            own = {str(name): float(value) for name, value in function(answered).items()}
        if both := sorted(own.keys() & taken.keys()):
            raise ValueError(f"{both[0]} is the name of another metric")
        return own
    except Exception as error:  # user code may raise anything, and the other numbers are right
        log.warning("evaluation.datasets: metrics raised %s", plugins.describe_raised(error))
        return {"own_failed": 1.0}


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


RESAMPLES: Final = 1000
_AT_ONCE: Final = 2**22
"""Numbers per block of resamples, which bounds memory."""


def interval(
    values: NDArray[np.float64], *, seed: int, resamples: int = RESAMPLES
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return 95 % percentile intervals of the means of M quantities over P prompts.  [P, M] -> low [M], high [M]

    Prompts are drawn with replacement; all quantities share the same draws. With one prompt, low equals high.
    """
    num_prompts, num_quantities = values.shape
    if not num_prompts:
        raise ValueError("there is no prompt to resample")
    generator = np.random.default_rng(seed)
    even = np.full(num_prompts, 1 / num_prompts)
    means = np.empty((resamples, num_quantities))
    block = max(1, _AT_ONCE // num_prompts)
    for start in range(0, resamples, block):
        stop = min(resamples, start + block)
        counts = generator.multinomial(num_prompts, even, size=stop - start)
        means[start:stop] = counts @ values / num_prompts
    low, high = np.quantile(means, [0.025, 0.975], axis=0)
    return low, high


def pass_at_k(num_samples: int, num_solved: int, k: int) -> float:
    """Return the probability that at least one of k answers is solved.

    0 <= num_solved <= num_samples, 1 <= k <= num_samples
    """
    _check(num_samples, num_solved, k)
    return 1.0 - math.comb(num_samples - num_solved, k) / math.comb(num_samples, k)


def pass_all_k(num_samples: int, num_solved: int, k: int) -> float:
    """Return the probability that all of k answers are solved (pass^k)."""
    _check(num_samples, num_solved, k)
    return math.comb(num_solved, k) / math.comb(num_samples, k)


def majority(votes: Sequence[str], solved: Sequence[bool]) -> float:
    """Return whether the most frequent answer is solved, in [0, 1].

    votes  the normalized answer of each sample; "" for an answer without a vote. Without any vote the result is 0

    Ties are averaged: each of the most frequent answers is equally likely to be chosen. If a reward judged equal
    answers differently, the answer counts by its solved share.
    """
    ballots: defaultdict[str, list[bool]] = defaultdict(list)
    for vote, is_solved in zip(votes, solved, strict=True):
        if vote:
            ballots[vote].append(is_solved)
    if not ballots:
        return 0.0
    most = max(map(len, ballots.values()))
    winners = [sum(ballot) / len(ballot) for ballot in ballots.values() if len(ballot) == most]
    return sum(winners) / len(winners)


def counts_of_k(num_samples: int) -> list[int]:
    """Return the k that are reported for n answers: 1, 2, 4, ... and n itself."""
    powers = [2**power for power in range(num_samples.bit_length()) if 2**power <= num_samples]
    return powers if powers[-1] == num_samples else [*powers, num_samples]


def _check(num_samples: int, num_solved: int, k: int) -> None:
    if not (0 <= num_solved <= num_samples and 1 <= k <= num_samples):
        raise ValueError(f"k = {k} of {num_samples} answers, {num_solved} of them solved, is impossible")
