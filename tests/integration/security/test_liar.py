"""A liar among honest workers: whatever it answers or withholds, the run continues and every honest group is trained.

Real actors on the memory bus. Each example is a whole run with MESSAGES lies. All examples together have 300 by
default; a nightly run sets ASYNCRL_FUZZ_CASES=10000 and ASYNCRL_EXPLORE=1. Real processes with kills: bin/chaos --liar.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.actors.learner import history
from asyncrl.actors.learner.history import HISTORY_FILE
from asyncrl.actors.learner.validator import Validator
from asyncrl.bus.memory.bus import MemoryBus
from asyncrl.messages import PromptGroup, replace
from asyncrl.messages.codec import decode
from asyncrl.messages.topics import ACTORS, EVENTS, PROMPTS, TRAJECTORIES, answer_key
from asyncrl.policies.audit.accounting import account
from asyncrl.policies.groups.logprob_mismatch import LogprobMismatch
from asyncrl.policies.groups.tickets import Tickets
from asyncrl.policies.groups.validation import GroupValidation
from tests.actors.learner.test_failed_batches import Shards
from tests.conftest import BUS_SIZES
from tests.harness import lies
from tests.harness.fakes import Backend, Engine, Loop, run_worker, until, worker
from tests.harness.rows import Rows
from tests.integration.security.test_hostile import CASES

MESSAGES = 100
LOG_BYTES = 2**28
MOST_KEPT = 3
"""Prompts that the liar takes and keeps for good. The window has room for eight groups, a batch for two."""
WAIT_SECONDS = 0.02


class Trainer(Backend):
    """Its outputs match the fake engine's logprobs."""

    def forward(self, shares: Shards, *, model: str = "policy") -> Any:
        return [[np.full(m.num_tokens, -1.0, np.float32) for m in share] for share in shares]


async def lie(bus: MemoryBus, loop: Loop, seeds: Sequence[int]) -> None:
    """Tell one lie per seed: answer or keep a prompt that was lent to the liar, or publish what nobody requested."""
    kept: list[object] = []
    async with bus.consume(PROMPTS) as deliveries:
        for random in map(Random, seeds):
            if random.random() < 0.3:
                key = lies.key_of_nobody(random, newest=loop.table.next_group_id)
                topic, key, data = random.choice(
                    [("trajectories", key, random.randbytes(50)), lies.said_elsewhere(random)]
                )
                if topic == "actors":
                    bus._state(ACTORS).put(key, data)
                else:
                    bus._log(TRAJECTORIES if topic == "trajectories" else EVENTS).add(key, data)
                await asyncio.sleep(0)
                continue
            delivery = await anext(deliveries)
            if delivery.message is None:
                continue
            if len(kept) < MOST_KEPT and random.random() < 0.1:
                kept.append(delivery)
                continue
            data = lies.answer_to(delivery.message, random, max_bytes=bus.max_message_bytes)
            key = answer_key(delivery.message.group_id, worker="evil", ticket=delivery.message.ticket)
            bus._log(TRAJECTORIES).add(key, data)
            if random.random() < 0.1:
                bus._log(TRAJECTORIES).add(key, data)  # publish it again
            await delivery.ack()


async def run_among_lies(seeds: Sequence[int], directory: Path) -> tuple[Loop, set[int]]:
    """Run an honest worker and a liar until all lies are published. Return the groups that the honest worker made."""
    bus = MemoryBus(**(BUS_SIZES | {"max_message_bytes": 2**20, "max_prompts": 1000, "max_log_bytes": LOG_BYTES}))
    possible = GroupValidation(vocabulary_size=64, context_tokens=1000, largest_reward=1e6, are_answers_whole=True)
    validator = Validator(bus, validation=possible, logprob_check=LogprobMismatch(bound=0.5, every=3))
    waits: dict[str, Any] = {"wait_for_stragglers": True, "staleness": {"wait_seconds": WAIT_SECONDS}}
    tickets = Tickets(b"of this run")
    loop = Loop(
        bus, directory, steps=10**6, rows=Rows(count=50), validator=validator, max_staleness=3, tickets=tickets, **waits
    )
    loop.backend = Trainer()
    async with asyncio.TaskGroup() as group:
        honest = group.create_task(run_worker(worker(bus, Engine(), name="honest", max_running=4)))
        while "honest" not in await bus.states(ACTORS):
            await asyncio.sleep(0)
        learner = group.create_task(loop.run_learner())
        while not await bus.keys(PROMPTS):
            await asyncio.sleep(0)
        await lie(bus, loop, seeds)
        steps = loop.backend.steps
        while loop.backend.steps < steps + 3:
            await asyncio.sleep(0.001)
        loop.learner.drain()
        await learner
        honest.cancel()
    made = set()
    last = await bus.last_sequence(TRAJECTORIES)
    async with bus.read(TRAJECTORIES) as records:
        for _ in range(last):
            message = (await anext(records)).message
            if message is not None and message.worker == "honest" and message.trajectories:
                made.add(message.group_id)
    return loop, made


@pytest.mark.timeout(900 + CASES)
@settings(max_examples=max(1, CASES * 3 // 5 // MESSAGES), suppress_health_check=list(HealthCheck), deadline=None)
@given(seeds=st.lists(st.integers(0, 2**64), min_size=MESSAGES, max_size=MESSAGES))
def test_the_run_goes_on_and_trains_every_honest_group(seeds: list[int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "run"
        loop, honest = asyncio.run(run_among_lies(seeds, directory))
        entries = history.read(directory / HISTORY_FILE)
        assert account(entries, saved=None, bus=None).is_clean
    fates = {group_id: entry.kind for entry in entries for group_id in entry.groups}
    assert {fates.get(group_id, "trained") for group_id in honest} <= {"trained", "dropped"}
    assert "honest" not in loop.validator.quarantined  # type: ignore[union-attr]
    for micro_batch in [one for step in loop.backend.trained for one in step]:
        assert np.isfinite(micro_batch.advantages).all()
        assert np.abs(micro_batch.advantages).max() < 1e7
        assert np.diff(micro_batch.boundaries).max() <= 6  # two tokens of the prompt, four of the answer


async def test_an_answer_of_somebody_who_was_not_lent_the_group_is_nobodys(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """While an honest worker has the first prompts, a liar answers groups 0, 1 and 2 and the later group 9, with every
    key that it can invent. Its answers take no place and fail no group, and the honest answers are trained."""
    bus = MemoryBus(**(BUS_SIZES | {"max_message_bytes": 2**20, "max_prompts": 1000, "max_log_bytes": LOG_BYTES}))
    possible = GroupValidation(vocabulary_size=64, context_tokens=1000, largest_reward=1e6, are_answers_whole=True)
    validator = Validator(bus, validation=possible, logprob_check=LogprobMismatch(bound=0.5, every=3))
    tickets = Tickets(b"of this run")
    rows = Rows(count=50)
    loop = Loop(bus, tmp_path / "run", steps=6, rows=rows, validator=validator, max_staleness=3, tickets=tickets)
    loop.backend = Trainer()
    engine, random = Engine(), Random(0)
    engine.gate.clear()
    log = bus._log(TRAJECTORIES)
    async with asyncio.TaskGroup() as group:
        honest = group.create_task(run_worker(worker(bus, engine, name="honest", max_running=4)))
        learner = group.create_task(loop.run_learner())
        await until(lambda: engine.running == 4)
        for group_id in (0, 1, 2, 9):
            prompt = replace(decode(bus._work(PROMPTS)._stored["0"].data, PromptGroup), group_id=group_id)
            for key in (
                f"evil/{group_id}",
                answer_key(group_id, worker="evil", ticket="0" * 32),
                answer_key(group_id, worker="evil", ticket=tickets.ticket(3)),
            ):
                answers = [lies.trajectory(prompt, random, mask=group_id > 0) for _ in "12"]
                assert log.add(key, lies.group(prompt, answers, random, worker="evil"))
        engine.gate.set()
        await learner
        honest.cancel()
    entries = history.read(tmp_path / "run" / HISTORY_FILE)
    fates = {group_id: entry.kind for entry in entries for group_id in entry.groups}
    assert set(fates.values()) == {"trained"} and {0, 1, 2, 3} <= fates.keys()
    assert account(entries, saved=None, bus=None).is_clean
    assert not validator.quarantined
    assert "rejected by 'evil': group 0 is answered without its ticket" in caplog.text
