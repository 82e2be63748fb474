"""Which of the arrived groups the next step trains, as functions of (oldest version, group id) only.

Arrival times are not an input, so the training order does not depend on them. ``Key`` is (effective version of the
group's oldest token, group id). Ids are assigned in the order of the prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Final

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
