"""Which of the groups that have arrived the next step trains, as functions of (oldest version, group id) alone.

No arrival time enters, so the order of training does not depend on it. ``Key`` is (effective version of the group's
oldest token, group id); ids are handed out in the order of the prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final, Literal

Key = tuple[int, int]
Order = Callable[[Key], Key]
"""A sort key: the groups of the lowest go first."""


def oldest_first(key: Key) -> Key:
    """By version, then id: nothing waits until it is too old. The default, and NeMo-RL's weight FIFO without a gate."""
    return key


def freshest_first(key: Key) -> Key:
    """Newest version first, then id: least staleness now, and old groups go stale in the buffer.

    As NeMo-RL's windowed sampler with freshest first. Long answers are always old ones, so they are what it drops:
    compare length/dropped with length/trained.
    """
    version, group_id = key
    return (-version, group_id)


def in_order(key: Key) -> Key:
    """By id, which is the order of the prompts. With ``leading`` a batch waits for the groups between."""
    version, group_id = key
    return (group_id, version)


ORDERS: Final[dict[str, Order]] = {"oldest_first": oldest_first, "freshest_first": freshest_first, "in_order": in_order}


def select(keys: Collection[Key], *, count: int, order: Order = oldest_first) -> list[Key] | None:
    """The first ``count`` groups; None when there are fewer: a batch is whole."""
    return sorted(keys, key=order)[:count] if len(keys) >= count else None


def leading(keys: Iterable[Key], *, is_done: Callable[[int], bool], first: int = 0) -> list[Key]:
    """The groups behind which nothing is missing: from id ``first`` on, up to the first that is neither here nor done.

    NeMo-RL's in-order sampler, and what makes one: ``select`` from these with ``in_order``. One straggler holds
    everybody up.
    """
    by_id = {group_id: (version, group_id) for version, group_id in keys if group_id >= first}
    result: list[Key] = []
    group_id = first
    while group_id in by_id or (is_done(group_id) and len(result) < len(by_id)):
        if group_id in by_id:
            result.append(by_id[group_id])
        group_id += 1
    return result


# -- groups that are not whole yet -------------------------------------------------------------------------------------

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
    """What to do with a group some of whose members may still be generated.

    versions  of each member that has started, of its oldest token;  is_done  whether it has finished

    A group is trained whole: all members done, none too old (prime-rl, miles, SkyRL); one that is too old drops the
    whole group. With ``at_least`` (2 or more, or a group baseline means nothing) a straggler does not take the others
    with it: at the last step that may train the group, the members that are done are trained if they are so many. There
    is no clock in the rule; the bound on staleness is the time-out. The mean over fewer members is still a baseline,
    the unbiased standard deviation divides by their number - 1.
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
