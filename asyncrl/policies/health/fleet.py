"""Findings about processes that work but do not fit together: other code, functions, tokenizers, clocks.

Every process reports checksums of what it runs (launch/checks/own_code.py) and its wall-clock time. They are compared
with the learner's. Tests: tests/unit/policies/health/test_fleet.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from asyncrl.policies.health.faults import (
    EVALUATION_WORKER,
    LEARNER,
    SILENT_SECONDS,
    WORKER,
    Finding,
    Observation,
    Seen,
)

CODE: Final = "process/code"
FUNCTIONS: Final = "process/functions"
TOKENIZER: Final = "process/tokenizer"
CLOCK: Final = "process/clock"
"""Numbers in the heartbeat of a process's first actor: checksum of asyncrl's own code; of the names of the reward and
rollout functions; of the model's vocabulary and end tokens; Unix seconds."""
JUMP_SECONDS: Final = 5.0
APART_SECONDS: Final = 60.0
"""Longer than a heartbeat can be in transit or wait on the bus."""

SAYS: Final = {
    CODE: (
        "other code",
        "runs another version of asyncrl than the learner",
        "install the learner's version on its machine and restart it; `asyncrl --version` does not show edited files",
    ),
    FUNCTIONS: (
        "other functions",
        "was started with another reward or rollout function than the learner",
        "restart it with the run file of the learner (reward.kind, reward.rows, data.reward_key, rollout.function)",
    ),
    TOKENIZER: (
        "other tokenizer",
        "has another tokenizer or other end tokens at its model.path than the learner",
        "restart it with the learner's model folder; until then its rewards and the ends of its answers are wrong",
    ),
}


def present(seen: Observation) -> Iterable[Finding]:
    heard = {name: one for name, one in seen.actors.items() if one.seconds <= SILENT_SECONDS}
    learners = [one for one in heard.values() if one.beat.role == LEARNER]
    yield from _jumps(seen)
    if learners:
        yield from _others(heard, learners[0])
        yield from _apart(heard, learners[0])


def _others(heard: dict[str, Seen], learner: Seen) -> Iterable[Finding]:
    for name, one in sorted(heard.items()):
        if one.beat.role not in (WORKER, EVALUATION_WORKER):
            continue
        for number, (fault, says, remedy) in SAYS.items():
            theirs, ours = one.beat.numbers.get(number), learner.beat.numbers.get(number)
            if None not in (theirs, ours) and theirs != ours:
                yield Finding(
                    fault=fault,
                    actor=name,
                    cause=f"worker {name} {says}",
                    remedy=remedy,
                    host=one.beat.host,
                    pid=one.beat.pid,
                )


def _jumps(seen: Observation) -> Iterable[Finding]:
    """Yield one finding per clock jump of a machine, however many of its processes saw it.

    No wait depends on a clock, but times in logs and metrics are off. A clock that was set back and then corrected has
    jumped twice.
    """
    jumps: dict[str, list[float]] = {}
    for one in seen.actors.values():
        known, shift = jumps.setdefault(one.beat.host, []), one.beat.clock_shift
        if abs(shift) > JUMP_SECONDS and all(abs(shift - other) > JUMP_SECONDS for other in known):
            known.append(shift)
    for host, shift in sorted((host, shift) for host, shifts in jumps.items() for shift in shifts):
        yield Finding(
            fault="clock",
            actor=host,
            cause=f"the clock of {host} jumped by {shift:+.0f} s",
            remedy="no wait depends on it, but times in logs and metrics are off by as much",
            which=f" of {shift:+.0f} s",
        )


def _apart(heard: dict[str, Seen], learner: Seen) -> Iterable[Finding]:
    """Yield one finding per machine whose clock differs from the learner's."""
    hosts: dict[str, float] = {}
    for one in heard.values():
        if one.clock is not None:
            hosts.setdefault(one.beat.host, one.clock)
    ours = hosts.get(learner.beat.host)
    for host, clock in sorted(hosts.items()):
        if ours is not None and abs(clock - ours) > APART_SECONDS:
            yield Finding(
                fault="clock apart",
                actor=host,
                cause=f"the clock of {host} is {abs(clock - ours):.0f} s {'ahead of' if clock > ours else 'behind'} "
                "that of the learner's machine",
                remedy="set it (NTP): no wait depends on it, but times in logs and `asyncrl trace` are off by as much",
            )
