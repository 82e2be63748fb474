"""With eviction "wait", the learner holds rather than let a group in generation become too stale."""

from __future__ import annotations

from collections import deque

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.messages import Heartbeat
from asyncrl.policies.groups.selection import Selection
from asyncrl.policies.groups.started_groups import StartedGroups
from asyncrl.policies.groups.table import GroupTable
from tests.harness.groups import group


def test_waiting_holds_the_step_that_would_make_a_straggler_too_old() -> None:
    rule = Selection(max_staleness=2)
    # The group was admitted at version 1 and is still in generation. The step from 3 makes version 4, and 4 - 1 > 2.
    assert not rule.late_starts(2, [1], count=1)
    assert rule.late_starts(3, [1], count=1)


def test_waiting_leaves_a_turn_to_every_straggler() -> None:
    """Three groups from version 1, two per batch: if two of them had their turn at version 3, the last one would have
    its turn at version 4."""
    rule = Selection(max_staleness=2)
    assert not rule.late_starts(1, [1, 1, 1], count=2)
    assert rule.late_starts(2, [1, 1, 1], count=2)
    assert not rule.late_starts(2, [1, 1, 2], count=2)
    assert not rule.late_starts(2, [1, 1, 1], count=3)


@given(
    batch_size=st.integers(1, 4),
    bound=st.integers(1, 4),
    slots=st.integers(1, 24),
    step_ticks=st.integers(1, 6),
    beat_ticks=st.integers(0, 20),
    load_ticks=st.integers(0, 4),
    seed=st.integers(0, 2**32),
)
def test_a_learner_that_waits_for_stragglers_drops_none(
    batch_size: int, bound: int, slots: int, step_ticks: int, beat_ticks: int, load_ticks: int, seed: int
) -> None:
    """The test has its own clock. A group takes 1 to about 60 ticks once a slot is free, and admission limits the
    number in flight. The learner hears every ``beat_ticks`` ticks which groups have begun, or never (0)."""
    lengths = np.random.default_rng(seed).lognormal(1.0, 1.2, 10_000).astype(int) + 1
    rule, table = Selection(max_staleness=bound), GroupTable()
    started = StartedGroups()
    is_free_at = tick = 0
    queue: deque[int] = deque()
    running: dict[int, tuple[int, int]] = {}  # group -> its version, and the tick at which it is done
    steps_done_at: list[int] = []
    while table.step < 12:
        tick += 1
        if table.training and tick >= is_free_at:
            table.trained(max_staleness=0)
            steps_done_at.append(tick)
        for group_id, (start, done) in list(running.items()):
            if done <= tick:
                del running[group_id]
                table.arrive(1 + group_id, group(group_id, version=start), now=0.0)
        loaded = sum(done + load_ticks <= tick for done in steps_done_at)
        if beat_ticks and tick % beat_ticks == 0:
            said = {str(group_id): start for group_id, (start, _) in running.items()}
            beat = Heartbeat(actor="w0", role="rollout-worker", policy_version=loaded, begun=said)
            started.update([beat], outstanding=table.outstanding, resume_points={})
        if not table.training:
            table.drop(rule.stale(table))
            chosen = rule.next_batch(table, count=batch_size)
            starts = started.starts(table.outstanding)
            if chosen is not None and not rule.late_starts(table.step, starts, count=batch_size):
                table.take(chosen)
                is_free_at = tick + step_ticks
        while len(table.outstanding | table.buffered | table.training) < (bound + 1) * batch_size:
            queue.append(table.next_group_id)
            table.publish(queue[-1], position=queue[-1], oldest_start=table.step)
        while queue and len(running) < slots and loaded >= (table.outstanding[queue[0]].oldest_start or 0):
            first = queue.popleft()
            running[first] = (loaded, tick + lengths[first])
        assert tick < 100_000
    assert table.counts["dropped"] == 0
