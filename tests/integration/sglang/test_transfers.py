"""Weight transfers from the learner's memory into a real SGLang server."""

from __future__ import annotations

import asyncio
import gc
import shutil
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import pytest_asyncio

from asyncrl.engines.generation import Generation
from asyncrl.engines.sglang import engine as sglang
from asyncrl.errors import WeightsError
from asyncrl.messages import SamplingParams
from asyncrl.tensors.snapshot import Snapshot
from asyncrl.weights.nccl import Sender
from asyncrl.weights.nccl_channel import CollectiveReceiver, NCCLChannel, NearestReceiver
from tests.harness.engines import PROMPT, Check, Model, announce, chosen_experts, switched_logprobs
from tests.harness.fakes import until
from tests.harness.forked import ForkServer
from tests.harness.forked_sglang import forking
from tests.harness.transfers import changed, join, layouts, offering, receive, receiver_of, snapshot
from tests.integration.extending import toy_sockets
from tests.integration.extending.toy_sockets import SocketChannel

LONG = SamplingParams(max_new_tokens=400, ignore_eos=True)
SHORT = SamplingParams(max_new_tokens=20, ignore_eos=True)
TOLERANCE = 1e-4
BY_LOADER, BY_SGLANG = "/update_weights_from_tensor", "/update_weights_from_distributed"

T = TypeVar("T", bound=Callable[..., Any])


@pytest.fixture
def old(old_model: Model) -> Model:
    return old_model


@pytest.fixture
def new(new_model: Model) -> Model:
    return new_model


def on_a_server(test: T) -> T:
    """Needs the shared server."""
    marks = (
        pytest.mark.sglang,
        pytest.mark.slow,
        pytest.mark.xdist_group("sglang"),
        pytest.mark.asyncio(loop_scope="session"),
    )
    for mark in marks:
        test = mark(test)
    return test


@pytest_asyncio.fixture(loop_scope="session")
async def engine(sglang_server: sglang.SGLangEngine, old: Model) -> sglang.SGLangEngine:
    """An engine that samples from the old model as version 0:1 and is connected to no learner."""
    await sglang_server.load(old.version(1))
    return sglang_server


@pytest_asyncio.fixture(loop_scope="session")
async def receiver(engine: sglang.SGLangEngine) -> AsyncIterator[CollectiveReceiver]:
    made = receiver_of(engine)
    yield made
    await made.leave()


def holding(model: Model, version: int) -> Sender:
    sender = Sender("127.0.0.1")
    sender.set_weights(snapshot(model), incarnation=0, policy_version=version)
    return sender


async def tear(receiver: CollectiveReceiver, model: Model, version: int) -> None:
    """Simulate a learner that dies after sending the first bucket."""
    whole = snapshot(model)
    sender = Sender("127.0.0.1")
    sender.set_weights(Snapshot(buckets=whole.buckets[:1]), incarnation=0, policy_version=version)
    await join(receiver, sender)
    transfer = sender.begin(receiver.request)
    offer = changed(transfer.offer, buckets=layouts(model))
    receiving = asyncio.ensure_future(receiver.receive(offering(offer)))
    await asyncio.to_thread(transfer.send)
    del transfer, sender
    gc.collect()
    with pytest.raises(WeightsError):
        await receiving


def through_the_loader(
    engine: sglang.SGLangEngine, receiver: CollectiveReceiver, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """Treat the joined group as NCCL's. Returns the paths that the server is asked for from now on."""
    assert isinstance(engine.weight_updater, sglang.SGLangUpdater)
    monkeypatch.setitem(engine.weight_updater._kinds, receiver.request.group, "nccl")
    asked: list[str] = []
    post = engine._loader._post

    async def listed(path: str, body: Mapping[str, Any]) -> Any:
        asked.append(path)
        return await post(path, body)

    monkeypatch.setattr(engine._loader, "_post", listed)
    return asked


async def in_progress(engine: sglang.SGLangEngine, tasks: asyncio.TaskGroup) -> asyncio.Task[Generation]:
    """Return a long generation that has some tokens, because a short one that began with it is done."""
    task = tasks.create_task(engine.generate(PROMPT, LONG, seed=1))
    await engine.generate(PROMPT, SHORT, seed=2)
    assert not task.done()
    return task


def check_switch(generation: Generation, old: Model, new: Model, *, versions: tuple[int, int]) -> None:
    """Compare with the old weights' logprobs up to the boundary, then with the new weights on the old keys."""
    first, second = generation.version_spans
    assert (first.policy_version, second.policy_version) == versions
    distance = np.abs(old.logprobs(PROMPT, generation.tokens) - generation.logprobs)
    boundary = int(np.argmax(distance > 1e-3))
    assert boundary == second.start
    expected = switched_logprobs(old, new, PROMPT, generation.tokens, boundary=boundary)
    assert np.abs(expected - generation.logprobs[boundary:]).max() < TOLERANCE


@on_a_server
async def test_a_generation_goes_on_with_the_weights_that_were_sent(
    engine: sglang.SGLangEngine, receiver: CollectiveReceiver, old: Model, new: Model
) -> None:
    sender = holding(new, 2)
    await join(receiver, sender)
    async with asyncio.TaskGroup() as tasks:
        task = await in_progress(engine, tasks)
        report = await receive(receiver, sender)
        assert not task.done()
    assert 0 <= report.pause_seconds <= report.load_seconds
    assert len(task.result().tokens) == LONG.max_new_tokens
    check_switch(task.result(), old, new, versions=(1, 2))
    assert engine.version == (0, 2)


@on_a_server
async def test_many_transfers_pass_through_one_group(
    engine: sglang.SGLangEngine, receiver: CollectiveReceiver, old: Model, new: Model
) -> None:
    """The same long prompt each time: the prefix cache must not reuse keys of other weights."""
    sender = holding(old, 1)
    await join(receiver, sender)
    group, prompt = receiver.request.group, np.tile(PROMPT, 20)
    for version, model in ((2, new), (3, old), (4, new)):
        sender.set_weights(snapshot(model), incarnation=0, policy_version=version)
        await receive(receiver, sender)
        generation = await engine.generate(prompt, SHORT, seed=0)
        assert Check(model)(generation, prompt) < TOLERANCE
        assert [span.policy_version for span in generation.version_spans] == [version]
    assert receiver.request.group == group


@on_a_server
async def test_folders_and_transfers_take_turns(
    engine: sglang.SGLangEngine, receiver: CollectiveReceiver, old: Model, new: Model
) -> None:
    sender = holding(new, 2)
    await join(receiver, sender)
    await receive(receiver, sender)
    await engine.load(old.version(3))
    assert Check(old)(await engine.generate(PROMPT, SHORT, seed=0)) < TOLERANCE
    sender.set_weights(snapshot(new), incarnation=0, policy_version=4)
    await receive(receiver, sender)
    assert Check(new)(await engine.generate(PROMPT, SHORT, seed=0)) < TOLERANCE


@on_a_server
async def test_our_loader_in_the_server_receives_all_buckets_in_one_order(
    engine: sglang.SGLangEngine, receiver: CollectiveReceiver, old: Model, new: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As over NCCL; here its group is gloo's. Folders take turns with it."""
    sender = holding(new, 2)
    await join(receiver, sender)
    asked = through_the_loader(engine, receiver, monkeypatch)
    async with asyncio.TaskGroup() as tasks:
        task = await in_progress(engine, tasks)
        await receive(receiver, sender)
        assert not task.done()
    check_switch(task.result(), old, new, versions=(1, 2))
    assert BY_LOADER in asked and BY_SGLANG not in asked
    await engine.load(old.version(3))
    assert Check(old)(await engine.generate(PROMPT, SHORT, seed=0)) < TOLERANCE
    sender.set_weights(snapshot(new), incarnation=0, policy_version=4)
    await receive(receiver, sender)
    assert Check(new)(await engine.generate(PROMPT, SHORT, seed=0)) < TOLERANCE
    assert engine.version == (0, 4)


@on_a_server
async def test_a_server_that_does_not_find_its_group_gets_a_folder_and_then_sglangs_way(
    engine: sglang.SGLangEngine, receiver: CollectiveReceiver, old: Model, new: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(engine.weight_updater, sglang.SGLangUpdater)
    monkeypatch.setitem(engine.weight_updater._kinds, "not joined", "nccl")
    monkeypatch.setattr(engine._loader, "finds_groups", True)
    with pytest.raises(
        WeightsError, match="loader in the server cannot receive: .*not joined; from now on SGLang's does"
    ):
        await engine.weight_updater.receive((0, 2), [("not joined", layouts(new))])
    assert engine.version < (0, 0)
    await engine.load(old.version(3))
    assert Check(old)(await engine.generate(PROMPT, SHORT, seed=0)) < TOLERANCE
    sender = holding(new, 4)
    await join(receiver, sender)
    asked = through_the_loader(engine, receiver, monkeypatch)
    await receive(receiver, sender)
    assert BY_LOADER not in asked and BY_SGLANG in asked
    assert Check(new)(await engine.generate(PROMPT, SHORT, seed=0)) < TOLERANCE


@on_a_server
async def test_a_folder_that_is_removed_while_it_is_loaded_is_loaded(
    engine: sglang.SGLangEngine, old: Model, new: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that the learner deletes in the meantime stay readable until the server has loaded all of them."""
    folder = tmp_path / "new"
    shutil.copytree(new.folder, folder)
    told = engine._loader._post

    async def remove_first(path: str, body: Mapping[str, Any]) -> Any:
        shutil.rmtree(folder, ignore_errors=True)
        return await told(path, body)

    monkeypatch.setattr(engine._loader, "_post", remove_first)
    await engine.load(announce(folder, 2))
    assert not folder.exists()
    assert Check(new)(await engine.generate(PROMPT, SHORT, seed=0)) < TOLERANCE


@on_a_server
async def test_nothing_is_sampled_from_torn_weights(
    engine: sglang.SGLangEngine, receiver: CollectiveReceiver, old: Model, new: Model
) -> None:
    """The learner dies between two buckets. The folder of that version repairs the server."""
    async with asyncio.TaskGroup() as tasks:
        task = await in_progress(engine, tasks)
        await tear(receiver, new, 2)
        held = tasks.create_task(engine.generate(PROMPT, SHORT, seed=3))
        await until(lambda: engine.stats().queued == 1)
        assert not task.done()
        await engine.load(new.version(2))
    check_switch(task.result(), old, new, versions=(1, 2))
    assert Check(new)(held.result()) < TOLERANCE
    assert engine.version == (0, 2)


@on_a_server
async def test_another_learner_is_met_after_one_that_died(
    engine: sglang.SGLangEngine, receiver: CollectiveReceiver, old: Model, new: Model
) -> None:
    """The new learner's transfer repairs the server, just as a folder does."""
    await tear(receiver, new, 2)
    sender = holding(old, 3)
    await join(receiver, sender)
    await receive(receiver, sender)
    assert Check(old)(await engine.generate(PROMPT, SHORT, seed=0)) < TOLERANCE
    assert engine.version == (0, 3)


@on_a_server
async def test_a_channel_that_asyncrl_does_not_know_brings_weights_into_the_server(
    engine: sglang.SGLangEngine, new: Model, tmp_path: Path
) -> None:
    """Its function runs inside the server."""
    assert engine.weight_updater is not None
    channel = SocketChannel(tmp_path, keep=2, model_path=new.folder, options=toy_sockets.Options())
    channel.sender.set_weights(snapshot(new), incarnation=0, policy_version=2)
    receiver = channel.receiver(engine.weight_updater, engine="w0")
    await receive(receiver, channel.sender)
    generation = await engine.generate(PROMPT, SHORT, seed=0)
    assert Check(new)(generation) < TOLERANCE
    assert [span.policy_version for span in generation.version_spans] == [2]


@on_a_server
async def test_a_server_copies_the_learners_memory_on_its_machine(
    engine: sglang.SGLangEngine, new: Model, tmp_path: Path
) -> None:
    assert engine.weight_updater is not None
    channel = NCCLChannel(tmp_path, keep=2, model_path=new.folder, host="127.0.0.1", bucket_bytes=2**20)
    channel.sender.set_weights(snapshot(new), incarnation=0, policy_version=2)
    receiver = channel.receiver(engine.weight_updater, engine="w0")
    assert isinstance(receiver, NearestReceiver)
    await join(receiver, channel.sender)
    await receive(receiver, channel.sender)
    generation = await engine.generate(PROMPT, SHORT, seed=0)
    assert Check(new)(generation) < TOLERANCE
    assert [span.policy_version for span in generation.version_spans] == [2]


@pytest.mark.sglang
@pytest.mark.slow
async def test_two_tensor_parallel_ranks_of_a_mixture_take_weights_from_a_folder_and_from_the_learner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sglang_forks: ForkServer
) -> None:
    old, new = (Model(tmp_path / str(seed), seed=seed, architecture="qwen3_moe") for seed in (0, 1))
    engine = sglang.SGLangEngine(
        old.folder,
        device="cpu",
        dtype="float32",
        version=(0, 0),
        options=sglang.Options(tensor_parallel=2, server_arguments={"max-total-tokens": 5_000}),
        log_path=tmp_path / "w0.engine.log",
        reports_experts=True,
    )
    with forking(sglang_forks):
        await engine.start()
    try:
        answer = await engine.generate(PROMPT, SHORT, seed=0)
        assert Check(old)(answer) < TOLERANCE
        np.testing.assert_array_equal(np.sort(answer.experts[:-1], -1), chosen_experts(old, PROMPT, answer.tokens)[:-1])
        assert engine._loader.ranks_with_loader == 2
        await engine.load(new.version(1))
        answer = await engine.generate(PROMPT, SHORT, seed=0)
        assert Check(new)(answer) < TOLERANCE
        np.testing.assert_array_equal(np.sort(answer.experts[:-1], -1), chosen_experts(new, PROMPT, answer.tokens)[:-1])
        sender, receiver = holding(old, 2), receiver_of(engine)
        await join(receiver, sender)
        await receive(receiver, sender)
        assert Check(old)(await engine.generate(PROMPT, SHORT, seed=0)) < TOLERANCE
        asked = through_the_loader(engine, receiver, monkeypatch)
        sender.set_weights(snapshot(new), incarnation=0, policy_version=3)
        await receive(receiver, sender)
        assert BY_LOADER in asked and BY_SGLANG not in asked
        assert "tensors copied straight, 0 by load_weights" in (tmp_path / "w0.engine.log").read_text()
        assert Check(new)(await engine.generate(PROMPT, SHORT, seed=0)) < TOLERANCE
    finally:
        await engine.close()
