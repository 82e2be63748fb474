"""Token rewards to token advantages: returns-to-go, REINFORCE++, GAE, and whitening over the batch. Numpy, on the host.

M response tokens of S sequences lie end to end, ``sequence`` i64[M] non-decreasing as in segments.py. Observation
tokens are left out, so a running value is *carried* over them (verl, AReaL, NeMo-RL). Where it should end at each
observation instead (SkyRL's REINFORCE++ zeroes it), say ``observations="reset"`` and give ``positions`` i64[M], the
place of each token in its sequence: a gap in it is an observation. Frameworks that take observations for steps
(slime, OpenRLHF) learn the values of tokens that nobody chose; not offered.

Everything is float64; the caller casts.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Observations = Literal["carry", "reset"]


def reinforce(
    token_rewards: ArrayLike,
    sequence: ArrayLike,
    *,
    gamma: float = 1.0,
    observations: Observations = "carry",
    positions: ArrayLike | None = None,
) -> Floats:
    """Discounted sum of a token's reward and those after it, of its own sequence.  [M], i64[M] -> f64[M]

    Source: REINFORCE, Williams 1992; the returns of OpenRLHF and verl.
    """
    ends = _ends(sequence, observations=observations, positions=positions)
    return _running_sums(np.asarray(token_rewards, np.float64), ends, decay=gamma)


def token_rewards(
    rewards: ArrayLike, sequence: ArrayLike, *, kl: ArrayLike | None = None, kl_coef: float = 0.0
) -> Floats:
    """The trajectory's reward on its last token, minus kl_coef x KL on every token.  [S], i64[M], [M] -> f64[M]

    ``kl`` is an estimate per token (kl.k1 is exact in expectation as a reward), of the policy against the reference.
    A sequence without tokens has nowhere to put its reward and is left out.
    """
    index = np.asarray(sequence, np.int64)
    result = np.zeros(len(index)) if kl is None else -kl_coef * np.asarray(kl, np.float64)
    last = _ends(index)
    result[last] += np.asarray(rewards, np.float64)[index[last]]
    return result


def reinforce_pp(
    rewards: ArrayLike,
    sequence: ArrayLike,
    *,
    kl: ArrayLike | None = None,
    kl_coef: float = 0.01,
    gamma: float = 1.0,
    eps: float = 1e-8,
    observations: Observations = "carry",
    positions: ArrayLike | None = None,
    trained: ArrayLike | None = None,
) -> Floats:
    """REINFORCE++: returns-to-go of ``token_rewards``, whitened over the ``trained`` tokens of the whole batch.

    [S], i64[M] -> f64[M]. Source: arXiv:2501.03262. As verl; OpenRLHF whitens with the biased variance.
    """
    per_token = token_rewards(rewards, sequence, kl=kl, kl_coef=kl_coef)
    returns = reinforce(per_token, sequence, gamma=gamma, observations=observations, positions=positions)
    return whiten(returns, eps=eps, trained=trained)


def reinforce_pp_baseline(
    rewards: ArrayLike,
    group: ArrayLike,
    sequence: ArrayLike,
    *,
    eps: float = 1e-8,
    trained: ArrayLike | None = None,
) -> Floats:
    """Reward minus its group's mean on every token, whitened over the ``trained`` tokens of the whole batch.

    Rewards of the batch [S], their prompt group i64[S], sequence i64[M] -> f64[M]. No standard deviation per group.
    The group's mean is over all its members, also those of which no token is trained.
    Source: arXiv:2501.03262, the variant with a baseline; as verl.
    """
    values = np.asarray(rewards, np.float64)
    _, member = np.unique(np.asarray(group), return_inverse=True)
    means = np.bincount(member, weights=values) / np.bincount(member)
    return whiten((values - means[member])[np.asarray(sequence, np.int64)], eps=eps, trained=trained)


def gae(
    rewards: ArrayLike,
    values: ArrayLike,
    sequence: ArrayLike,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    bootstrap: ArrayLike | None = None,
    observations: Observations = "carry",
    positions: ArrayLike | None = None,
) -> tuple[Floats, Floats]:
    """Generalised advantage estimates and the returns (advantage + value) a critic learns.  [M] x 2 -> f64[M] x 2

    ``rewards`` and ``values`` are per token; the value of what comes after a sequence's last token is 0, as the episode
    is over. A truncated one is not: give ``bootstrap`` [S], the critic's value there (0 for finished sequences).
    With ``observations="reset"`` each stretch between observations is an episode of its own.

    Source: arXiv:1506.02438 eq. 16; gamma = lam = 1 as in slime, AReaL, OpenRLHF and verl. verl always whitens what
    comes out (``whiten``), the returns never.
    """
    index, value = np.asarray(sequence, np.int64), np.asarray(values, np.float64)
    ends = _ends(index, observations=observations, positions=positions)
    following = np.where(ends, 0.0, np.append(value[1:], 0.0))
    if bootstrap is not None:
        last = _ends(index)
        following[last] = np.asarray(bootstrap, np.float64)[index[last]]
    errors = np.asarray(rewards, np.float64) + gamma * following - value
    advantages = _running_sums(errors, ends, decay=gamma * lam)
    return advantages, advantages + value


def moments(values: ArrayLike) -> Floats:
    """Count, sum and sum of squares; those of ranks or shards add up.  [M] -> f64[3]"""
    numbers = np.asarray(values, np.float64)
    return np.array([len(numbers), numbers.sum(), np.square(numbers).sum()])


def whiten(
    values: ArrayLike,
    *,
    totals: ArrayLike | None = None,
    trained: ArrayLike | None = None,
    std: Literal["unbiased", "biased"] = "unbiased",
    eps: float = 1e-8,
    keep_mean: bool = False,
) -> Floats:
    """(values - mean) / sqrt(variance + eps) over all trained tokens of the batch.  [M] -> f64[M]

    ``trained`` bool[M] says which tokens make mean and variance, all of them by default; the others are moved and
    scaled alike. ``totals`` is the sum of ``moments`` over all parts of the batch, where ``values`` is only one. A
    batch of one token or of equal ones gives zeros. verl takes the unbiased variance and eps 1e-8 inside the root,
    OpenRLHF the biased.
    """
    numbers = np.asarray(values, np.float64)
    counted = numbers if trained is None else numbers[np.asarray(trained, np.bool_)]
    count, total, squares = np.asarray(moments(counted) if totals is None else totals, np.float64)
    if count == 0:
        return numbers
    mean = total / count
    # Of the deviations where they are at hand: the difference of squares loses digits to a large mean.
    spread = np.square(counted - mean).sum() if totals is None else max(squares - count * mean**2, 0.0)
    variance = spread / max(count - 1 if std == "unbiased" else count, 1)
    whitened: Floats = (numbers - mean) / np.sqrt(variance + eps)
    return whitened + mean if keep_mean else whitened


def _ends(
    sequence: ArrayLike, *, observations: Observations = "carry", positions: ArrayLike | None = None
) -> NDArray[np.bool_]:
    """bool[M]: nothing after this token counts for it. Raises ValueError for "reset" without positions."""
    index = np.asarray(sequence, np.int64)
    ends = np.append(index[1:] != index[:-1], True)[: len(index)]
    if observations == "carry":
        return ends
    if positions is None:
        raise ValueError('observations="reset" needs the positions of the tokens: a gap in them is an observation')
    place = np.asarray(positions, np.int64)
    gaps: NDArray[np.bool_] = ends | np.append(np.diff(place) != 1, True)[: len(index)]
    return gaps


def _running_sums(values: Floats, ends: NDArray[np.bool_], *, decay: float) -> Floats:
    """s[t] = values[t] + decay x s[t+1], started anew behind each end.

    All stretches advance together, from their last tokens on: as many steps as the longest has tokens.
    """
    result = values.copy()
    stops = np.flatnonzero(ends)
    lengths = np.diff(stops, prepend=-1)
    for back in range(1, int(lengths.max(initial=0))):
        places = stops[lengths > back] - back
        result[places] += decay * result[places + 1]
    return result
