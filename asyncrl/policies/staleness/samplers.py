"""Which of the arrived groups the next step trains, as functions of (oldest version, group id) only.

Arrival times are not an input, so the training order does not depend on them. ``Key`` is (effective version of the
group's oldest token, group id). Ids are assigned in the order of the prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final, Literal

Key = tuple[int, int]
Order = Callable[[Key], Key]
"""A sort key: groups with the lowest key go first."""


def oldest_first(key: Key) -> Key:
    """By version, then id, so that no group waits until it is too old. The default; NeMo-RL's weight FIFO, ungated."""
    return key


def freshest_first(key: Key) -> Key:
    """Newest version first, then by id: lowest staleness now, but old groups go stale in the buffer.

    This is NeMo-RL's windowed sampler with freshest first. Long answers are always old, so they are the ones dropped:
    compare length/dropped with length/trained.
    """
    version, group_id = key
    return (-version, group_id)


def in_order(key: Key) -> Key:
    """By id, which is the order of the prompts. With ``leading``, a batch waits for all groups in between."""
    version, group_id = key
    return (group_id, version)


ORDERS: Final[dict[str, Order]] = {"oldest_first": oldest_first, "freshest_first": freshest_first, "in_order": in_order}


def select(keys: Collection[Key], *, count: int, order: Order = oldest_first) -> list[Key] | None:
    """Return the first ``count`` groups; None if there are fewer, since a batch is never partial."""
    return sorted(keys, key=order)[:count] if len(keys) >= count else None


def leading(keys: Iterable[Key], *, is_done: Callable[[int], bool], first: int = 0) -> list[Key]:
    """Return the groups with no gap before them: from id ``first`` up to the first that is neither here nor done.

    ``select`` from these with ``in_order`` is NeMo-RL's in-order sampler. One straggler holds up all later groups.
    """
    by_id = {group_id: (version, group_id) for version, group_id in keys if group_id >= first}
    result: list[Key] = []
    group_id = first
    while group_id in by_id or (is_done(group_id) and len(result) < len(by_id)):
        if group_id in by_id:
            result.append(by_id[group_id])
        group_id += 1
    return result


# -- groups that are still incomplete ---------------------------------------------------------------------------------

Action = Literal["train", "wait", "drop"]


def group_action(
    versions: Sequence[int],
    is_done: Sequence[bool],
    *,
    group_size: int,
    policy_version: int,
    max_staleness: int,
    at_least: int | None = None,
) -> Action:
    """Decide what to do with a group that still has members in generation.

    versions  for each member that has started, the version of its oldest token
    is_done   for each of these members, whether it has finished

    By default a group is trained whole: all members done, none too old. One member that is too old drops the whole
    group (prime-rl, miles, SkyRL). With ``at_least``, a straggler does not take the others with it: at the last step
    that may train the group, the finished members are trained if there are at least that many. ``at_least`` counts as
    2 or more, since a group baseline needs two. The rule uses no clock; the bound on staleness is the timeout. The mean
    over fewer members is still a valid baseline, and the unbiased standard deviation divides by their number - 1.
    """
    if not versions:
        return "wait"
    oldest = min(versions)
    if policy_version - oldest > max_staleness:
        return "drop"
    num_done = sum(map(bool, is_done))
    if num_done == group_size:
        return "train"
    is_last_chance = policy_version + 1 - oldest > max_staleness
    if at_least is not None and num_done >= max(at_least, 2) and is_last_chance:
        return "train"
    return "wait"
