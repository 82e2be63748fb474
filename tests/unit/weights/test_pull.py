"""Weights that an engine fetches directly from the learner, over a channel that asyncrl does not know."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import torch

from asyncrl.engines.inprocess import engine as inprocess
from asyncrl.errors import WeightsError
from asyncrl.messages import SamplingParams
from asyncrl.weights.adapter import PullReceiver
from tests.harness.engines import PROMPT, Check, Model
from tests.harness.transfers import receive, snapshot
from tests.integration.extending import toy_sockets
from tests.integration.extending.toy_sockets import SocketChannel

SHORT = SamplingParams(max_new_tokens=8, ignore_eos=True)
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("old"), seed=0)


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("new"), seed=1)


@pytest.fixture
async def engine(old: Model) -> AsyncIterator[inprocess.InProcessEngine]:
    """An engine that samples from the old model as version 0:1."""
    options = inprocess.Options(threads=1)
    made = inprocess.InProcessEngine(old.folder, device="cpu", dtype="float32", version=(0, 1), options=options)
    await made.start()
    yield made
    await made.close()


@pytest.fixture
def channel(tmp_path: Path, new: Model) -> SocketChannel:
    """A channel whose learner holds the new model as version 0:2."""
    options = toy_sockets.Options()
    made = SocketChannel(tmp_path / "weights", keep=2, model_path=new.folder, options=options)
    made.sender.set_weights(snapshot(new), incarnation=0, policy_version=2)
    return made


async def test_the_engine_samples_from_what_its_channel_fetched(
    engine: inprocess.InProcessEngine, channel: SocketChannel, old: Model, new: Model
) -> None:
    assert Check(old)(await engine.generate(PROMPT, SHORT, seed=0)) < TOLERANCE
    report = await receive(channel.receiver(engine.weight_updater, engine="w0"), channel.sender)
    assert 0 <= report.pause_seconds <= report.load_seconds
    assert engine.version == (0, 2)
    assert Check(new)(await engine.generate(PROMPT, SHORT, seed=0)) < TOLERANCE


def raising(payload: bytes, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    yield "model.norm.weight", torch.zeros(1)
    raise ConnectionError(f"{payload.decode()} is gone")


def lacking(payload: bytes, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    yield from list(toy_sockets.tensors(payload, device))[1:]


async def test_a_fetch_that_fails_leaves_the_old_weights(
    engine: inprocess.InProcessEngine, channel: SocketChannel, old: Model
) -> None:
    with pytest.raises(WeightsError, match="test_pull: ConnectionError: the learner is gone"):
        await engine.update((0, 2), raising, b"the learner")
    with pytest.raises(ExceptionGroup) as raised:
        await receive(PullReceiver(engine, lacking, engine="w0"), channel.sender)
    assert raised.group_contains(WeightsError, match="is missing")
    assert engine.version == (0, 1)
    assert Check(old)(await engine.generate(PROMPT, SHORT, seed=0)) < TOLERANCE
