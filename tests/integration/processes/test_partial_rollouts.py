"""Two worker processes and a real nats-server: one is killed by SIGKILL, and the other resumes its tokens."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from asyncrl.actors.rollout.partial_rollouts import assemble_calls
from asyncrl.bus.jetstream.bus import JetStreamBus
from asyncrl.bus.nats_server.server import EmbeddedServer
from asyncrl.data import demo_task
from asyncrl.engines.generation import Generation
from asyncrl.messages import PromptGroup, SamplingParams
from asyncrl.messages.topics import PROMPTS, SEGMENTS, TRAJECTORIES, WEIGHTS
from tests.harness.buses import first, first_event
from tests.harness.engines import Model
from tests.harness.forked import ForkedCommand, ForkServer
from tests.harness.run_process import within

pytestmark = pytest.mark.slow

Connect = Callable[..., Awaitable[JetStreamBus]]

TOKENS = 1500
RUN_FILE = """
[run]
name = "tiny"
directory = "{folder}/runs"
[model]
path = "{folder}/old"
[data]
path = "{folder}/prompts.jsonl"
[engine]
kind = "inprocess"
[engine.options]
threads = 1
[reward]
kind = "asyncrl.data.demo_task:reward"
[learner]
backend = "reference"
groups_per_batch = 2
[rollout]
group_size = 2
max_new_tokens = {tokens}
ignore_eos = true
partial_save_seconds = 0.2
[bus]
url = "{url}"
max_message_bytes = 1048576
ack_seconds = 2.0
"""


@contextlib.contextmanager
def worker(forks: ForkServer, run_file: Path, name: str, *, token: str) -> Iterator[ForkedCommand]:
    """A rollout worker in its own process, killed at the end at the latest."""
    command = ["rollout-worker", str(run_file), "--name", name]
    environment = os.environ | {"ASYNCRL_BUS_TOKEN": token}
    process = forks.run(command, environment=environment, output=run_file.with_suffix(".txt"))
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def test_worker_continues_with_the_tokens_of_a_killed_one(
    tmp_path: Path, own_server: EmbeddedServer, connect: Connect, forks: ForkServer
) -> None:
    """New weights are published in between: version 0 sampled the first worker's tokens, version 1 the rest."""
    Model(tmp_path / "old", seed=0)
    new = Model(tmp_path / "new", seed=1)
    demo_task.write(tmp_path / "task")
    (tmp_path / "task" / "prompts.jsonl").rename(tmp_path / "prompts.jsonl")
    run_file = tmp_path / "run.toml"
    run_file.write_text(RUN_FILE.format(folder=tmp_path, tokens=TOKENS, url=own_server.url))
    bus = await connect(own_server, run="tiny", max_prompts=8, ack_seconds=2.0)
    sampling = SamplingParams(max_new_tokens=TOKENS, ignore_eos=True)
    prompt = PromptGroup(group_id=0, prompt_tokens=[5, 6, 7], group_size=2, sampling=sampling, prompt="1", label="2345")
    await bus.publish(PROMPTS, prompt, key="0")

    with worker(forks, run_file, "w0", token=own_server.token) as dying:
        async with within("a tenth of each answer is on the bus"):
            while min(map(tokens_of, await saved(bus)), default=0) < TOKENS // 10:
                await asyncio.sleep(0.01)
        dying.kill()
        dying.wait()
    left = await settled(bus)
    assert max(map(tokens_of, left)) < TOKENS
    await bus.put(WEIGHTS, new.version(1))
    with worker(forks, run_file, "w1", token=own_server.token):
        async with within("the other worker's group"):
            (record,) = await first(bus, 1, topic=TRAJECTORIES)
            event = await first_event(bus, "resumed")
        async with within("its ack, which follows both and requires a living worker"):
            while await bus.states(SEGMENTS, under="w1/") or await bus.depth(PROMPTS):
                await asyncio.sleep(0.05)

    group = record.message
    assert group.worker == "w1" and not group.error
    for trajectory, call in zip(group.trajectories, left, strict=True):
        count = tokens_of(call)
        assert len(trajectory.tokens) == TOKENS
        assert trajectory.tokens[:count].tolist() == call.tokens.tolist()
        assert trajectory.behavior_logprobs[:count].tolist() == call.logprobs.tolist()
        old_span, new_span = trajectory.version_spans
        assert (old_span.policy_version, new_span.policy_version) == (0, 1)
        assert new_span.start >= count  # the second worker may sample before it has loaded the new weights
    assert (event.kind, event.actor) == ("resumed", group.worker)
    assert event.data.pop("from") == "w0"
    assert event.data == {"group_id": 0, "tokens": sum(map(tokens_of, left)), "too_old_tokens": 0}


async def settled(bus: JetStreamBus) -> list[Generation]:
    """Return what is saved once the server has stored what the killed worker still sent."""
    before, found = [], await saved(bus)
    while list(map(tokens_of, before)) != list(map(tokens_of, found)):
        await asyncio.sleep(0.5)
        before, found = found, await saved(bus)
    return found


async def saved(bus: JetStreamBus) -> list[Generation]:
    """Return the first worker's saved tokens of each of the two samples; nothing while a sample has not begun."""
    segments = await bus.states(SEGMENTS, under="w0/0/1/")
    keys = (f"w0/0/1/{number}" for number in range(len(segments)))
    calls = assemble_calls(segments[key] for key in keys if key in segments)  # not the note of its beginning
    return [call for _, call in sorted(calls.items(), key=lambda item: item[0])] if len(calls) == 2 else []


def tokens_of(call: Generation) -> int:
    return len(call.tokens)
