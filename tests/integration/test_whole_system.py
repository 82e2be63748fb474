"""Every part at once: a real SGLang server, Megatron, JetStream, Ray, an agent, evaluations, a kill and a resume."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from tests.harness.families import make_tiny_family

pytest.importorskip("ray")

from asyncrl.data import demo_task
from asyncrl.engines.sglang.engine import Options, SGLangEngine
from asyncrl.errors import EngineDied
from asyncrl.messages import SamplingParams
from tests import ROOT
from tests.harness.forked import ForkServer
from tests.harness.forking_ray import FORKING_RAY, NAMES_THE_SERVER
from tests.harness.process_trees import all_gone, descendants, end_of
from tests.harness.ray import RayRun, TwoNodes

pytestmark = [pytest.mark.slow, pytest.mark.sglang, pytest.mark.xdist_group("ray"), pytest.mark.timeout(1200)]

STEPS = 10
RUN = """
[run]
name = "whole"
directory = "{folder}/runs"

[model]
path = "{folder}/model"

[data]
path = "{folder}/prompts.jsonl"
max_prompt_tokens = 16

[rollout]
function = "agent"
max_new_tokens = 5
group_size = 8

[rollout.options]
harness = "tests.harness.counting_agent:play"
chat_template = "{{% for m in messages %}}{{{{ m.content }}}}{{% endfor %}}"
timeout_seconds = 300.0
harness_options = {{ processes = 2, directory = "{root}" }}

[reward]
kind = "asyncrl.data.demo_task:reward"

[learner]
backend = "megatron"
threads = 1
groups_per_batch = 16
learning_rate = 2e-2
warmup_steps = 2
schedule = "linear"
min_learning_rate = 2e-3

[staleness]
max_staleness = 2

[evaluation]
every_steps = 5
at_start = true
at_end = true

[[evaluation.datasets]]
name = "held_out"
path = "{folder}/held_out.jsonl"
samples = 8

[checkpoint]
every_steps = 2

[metrics]
console = false
"""
SERVER = """
import asyncio, sys
from pathlib import Path
from asyncrl.engines.sglang.engine import Options, SGLangEngine

async def main():
    model, log_path = map(Path, sys.argv[1:])
    engine = SGLangEngine(model, device="cpu", dtype="float32", version=(0, 0),
                          options=Options(server_arguments={"max-total-tokens": 20_000,
                                                            "enable-deterministic-inference": True}),
                          log_path=log_path)
    await engine.start()
    print(engine.url, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture
async def owner(tmp_path: Path) -> AsyncIterator[Process]:
    """The process that owns the server."""
    demo_task.write(tmp_path)
    sizes = {"characters": demo_task.DIGITS, "max_positions": 64, "initializer_range": 0.05}
    make_tiny_family(tmp_path / "model", architecture="glm4_moe", **sizes)
    owner = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        SERVER,
        str(tmp_path / "model"),
        str(tmp_path / "server.log"),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    yield owner
    if owner.returncode is None:
        owner.kill()
        await end_of(owner)


async def test_a_mixture_learns_as_an_agent_on_sglang_under_ray_across_a_kill(
    tmp_path: Path, two_nodes: TwoNodes, forks: ForkServer, owner: Process, request: pytest.FixtureRequest
) -> None:
    """The server is a user's own, so that it outlives the killed run; in the end it goes with its owner.

    It is deterministic: an answer is that of its seed, whatever is sampled beside it. Ray's actors have the learner and
    the worker forked, as their imports were a quarter of the CPU time; test_ray.py starts them as a user does.
    """
    (tmp_path / "run.toml").write_text(RUN.format(folder=tmp_path, root=ROOT))
    assert owner.stdout is not None
    url = (await owner.stdout.readline()).decode().strip()
    two_nodes.mend()
    engine = ('engine.kind="sglang"', 'engine.device="cpu"', f'engine.options={{url="{url}"}}')
    places = ('launcher.options.learner.labels={site="a"}', 'launcher.options.rollout_worker.labels={site="b"}')
    run = RayRun(tmp_path, two_nodes, forks, *engine, *places, NAMES_THE_SERVER, name="whole", launcher=FORKING_RAY)
    request.addfinalizer(run.end)

    await asyncio.to_thread(run.start, steps=STEPS)
    await asyncio.to_thread(run.until, lambda: run.step >= STEPS // 2, "half of the steps")
    assert two_nodes.places() == {"learner": two_nodes.a, "w0": two_nodes.b}
    run.signal(signal.SIGKILL)
    assert await asyncio.to_thread(run.wait) == -signal.SIGKILL
    await asyncio.to_thread(run.start, "--resume", steps=STEPS)
    assert await asyncio.to_thread(run.wait) == 0, run.said

    lines = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    trained = {row["step"]: row for row in lines if "reward/mean" in row}
    assert sorted(trained) == list(range(1, STEPS + 1))
    fresh = [row["mismatch/fresh_mean"] for row in trained.values() if "mismatch/fresh_mean" in row]
    assert median(fresh) < 1e-4, fresh  # where two experts are nearly equal, one token may have the other one
    held_out = {int(row["step"]): row["evaluation/held_out/mean@8"] for row in lines if row.get("evaluation/complete")}
    assert {0, STEPS} <= set(held_out)
    assert held_out[0] < 0.1 < 0.2 < held_out[STEPS], held_out  # 0.06, and 0.28 to 0.67
    found = run.audit()
    assert (found["code"], found["lost"], found["duplicated"]) == (0, 0, 0), found

    attached = SGLangEngine(
        tmp_path / "model",
        device="cpu",
        dtype="float32",
        version=(0, 0),
        options=Options(url=url),
        log_path=tmp_path / "unused",
    )
    await attached.start()
    prompt, many = np.array([5, 6], np.int32), SamplingParams(max_new_tokens=30, ignore_eos=True)
    alone = await attached.generate(prompt, many, seed=7)
    other, among, _ = await asyncio.gather(*(attached.generate(prompt, many, seed=seed) for seed in (1, 7, 2)))
    assert among.tokens.tolist() == alone.tokens.tolist() != other.tokens.tolist()
    assert among.logprobs.tolist() == alone.logprobs.tolist()
    tree = descendants(owner.pid)
    assert len(tree) >= 4  # warden, server, scheduler, detokenizer
    owner.send_signal(signal.SIGKILL)
    await end_of(owner)
    assert await asyncio.to_thread(all_gone, tree)
    with pytest.raises(EngineDied):
        await attached.generate(prompt, many, seed=0)
    await attached.close()
