"""A group's age counts from the version with which a worker began it, however long its prompt waited on the bus."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.messages import Heartbeat
from asyncrl.policies.groups.started_groups import StartedGroups
from asyncrl.policies.groups.states import PublishedPrompt


def beat(
    version: int, *, begun: dict[int, int] | None = None, incarnation: int = 0, phase: str = "running"
) -> Heartbeat:
    return Heartbeat(
        actor="w",
        role="rollout-worker",
        incarnation=incarnation,
        policy_version=version,
        phase=phase,
        begun={str(group): oldest for group, oldest in (begun or {}).items()},
    )


def admitted(*versions: int | None) -> dict[int, PublishedPrompt]:
    return {group: PublishedPrompt(position=group, oldest_start=one) for group, one in enumerate(versions)}


def starts(*heard: list[Heartbeat], of: dict[int, PublishedPrompt], forks: dict[int, int] | None = None) -> list[int]:
    started = StartedGroups()
    for beats in heard:
        started.update(beats, outstanding=of, forks=forks or {})
    return started.starts(of)


def test_a_group_is_as_old_as_the_version_that_began_it() -> None:
    assert starts([beat(6, begun={0: 4})], of=admitted(1)) == [4]


def test_a_group_that_nobody_has_begun_is_as_old_as_the_oldest_version_that_can_begin_it() -> None:
    assert starts([beat(6), beat(5), beat(0, phase="starting")], of=admitted(1)) == [5]


def test_a_group_is_never_older_than_the_version_that_admitted_it() -> None:
    assert starts([beat(2, begun={0: 0})], of=admitted(3, 4)) == [3, 4]


def test_what_a_dead_worker_had_begun_keeps_its_age_until_another_takes_it_over() -> None:
    """The worker that takes over continues from the saved tokens, or reports a new start."""
    lived = [beat(6, begun={0: 3})]
    assert starts(lived, [beat(7)], of=admitted(1)) == [3]
    assert starts(lived, [beat(7)], [beat(7, begun={0: 7})], of=admitted(1)) == [7]


def test_a_version_of_a_lost_history_counts_as_the_fork() -> None:
    assert starts([beat(9, begun={0: 8}, incarnation=0)], of=admitted(1, 1), forks={1: 5}) == [5, 5]


@given(
    of=st.lists(st.integers(0, 9), min_size=1, max_size=6).map(lambda given: admitted(*given)),
    truth=st.lists(
        st.tuples(st.integers(0, 12), st.dictionaries(st.integers(0, 5), st.integers(0, 12), max_size=4)), max_size=4
    ),
)
def test_no_start_is_later_than_a_worker_can_have_begun(
    of: dict[int, PublishedPrompt], truth: list[tuple[int, dict[int, int]]]
) -> None:
    """Assumes truthful workers: a worker without a group will begin it with its current version or a newer one."""
    said = [beat(version, begun={g: min(v, version) for g, v in groups.items()}) for version, groups in truth]
    for group, start in enumerate(starts(said, of=of)):
        least = of[group].oldest_start or 0
        having = [one.begun[str(group)] for one in said if str(group) in one.begun]
        assert start >= least
        assert start <= max(least, min(having or [one.policy_version for one in said] or [0]))
