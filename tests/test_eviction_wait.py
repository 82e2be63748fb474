"""With eviction "wait" the learner holds rather than let a group that is still being generated get too old."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.policies.buffer import Buffer, Held
from tests.test_policies import group


def test_waiting_holds_the_step_that_would_make_a_straggler_too_old() -> None:
    buffer = Buffer(max_staleness=2)
    # A group admitted at version 1 and still generating: the step from 3 makes version 4, and 4 - 1 > 2.
    assert not buffer.must_wait(2, [1], count=1)
    assert buffer.must_wait(3, [1], count=1)


def test_waiting_leaves_a_turn_to_every_straggler() -> None:
    """Three from version 1 and two to a batch: from version 3 the last of them would have its turn at 4."""
    buffer = Buffer(max_staleness=2)
    assert not buffer.must_wait(1, [1, 1, 1], count=2)
    assert buffer.must_wait(2, [1, 1, 1], count=2)
    assert not buffer.must_wait(2, [1, 1, 2], count=2)
    assert not buffer.must_wait(2, [1, 1, 1], count=3)


@given(
    batch_size=st.integers(1, 4),
    bound=st.integers(1, 4),
    slots=st.integers(1, 24),
    step_ticks=st.integers(1, 6),
    seed=st.integers(0, 2**32),
)
def test_a_learner_that_waits_for_stragglers_drops_none(
    batch_size: int, bound: int, slots: int, step_ticks: int, seed: int
) -> None:
    """A clock of its own: groups take 1 to about 60 ticks, and no more are out than admission allows."""
    lengths = np.random.default_rng(seed).lognormal(1.0, 1.2, 10_000).astype(int) + 1
    buffer, version, begun, dropped, is_free_at = Buffer(max_staleness=bound), 0, 0, 0, 0
    training: list[Held] = []
    running: dict[int, tuple[int, int]] = {}  # group -> its version, and when it is done
    tick = 0
    while version < 12:
        tick += 1
        if training and tick >= is_free_at:
            version += 1
            for held in training:
                buffer.dispose(held)
            training = []
        for group_id, (start, done) in list(running.items()):
            if done <= tick:
                del running[group_id]
                buffer.add(1 + group_id, group(group_id, version=start), now=0.0)
        if not training:
            stale = buffer.evict(version)
            dropped += len(stale)
            taken = buffer.take(batch_size)
            starts = [start for start, _ in running.values()]
            if taken is not None and not buffer.must_wait(version, starts, count=batch_size):
                training, is_free_at = taken, tick + step_ticks
        while len(running) < slots and len(running) + len(buffer.held) < (bound + 1) * batch_size:
            running[begun] = (version, tick + lengths[begun])
            begun += 1
        assert tick < 100_000
    assert dropped == 0
