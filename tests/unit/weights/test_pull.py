"""Weights that an engine fetches directly from the learner, over a channel that asyncrl does not know."""

from __future__ import annotations

from collections.abc import Iterator
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


@pytest.fixture
def channel(tmp_path: Path, new_model: Model) -> SocketChannel:
    """A channel whose learner holds the new model as version 0:2."""
    options = toy_sockets.Options()
    made = SocketChannel(tmp_path / "weights", keep=2, model_path=new_model.folder, options=options)
    made.sender.set_weights(snapshot(new_model), incarnation=0, policy_version=2)
    return made


async def test_the_engine_samples_from_what_its_channel_fetched(
    engine: inprocess.InProcessEngine, channel: SocketChannel, old_model: Model, new_model: Model
) -> None:
    assert Check(old_model)(await engine.generate(PROMPT, SHORT, seed=0)) < TOLERANCE
    report = await receive(channel.receiver(engine.weight_updater, engine="w0"), channel.sender)
    assert 0 <= report.pause_seconds <= report.load_seconds
    assert engine.version == (0, 2)
    assert Check(new_model)(await engine.generate(PROMPT, SHORT, seed=0)) < TOLERANCE


def raising(payload: bytes, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    yield "model.norm.weight", torch.zeros(1)
    raise ConnectionError(f"{payload.decode()} is gone")


def lacking(payload: bytes, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    yield from list(toy_sockets.tensors(payload, device))[1:]


async def test_a_fetch_that_fails_leaves_the_old_weights(
    engine: inprocess.InProcessEngine, channel: SocketChannel, old_model: Model
) -> None:
    with pytest.raises(WeightsError, match="test_pull: ConnectionError: the learner is gone"):
        await engine.update((0, 2), raising, b"the learner")
    with pytest.raises(ExceptionGroup) as raised:
        await receive(PullReceiver(engine, lacking, engine="w0"), channel.sender)
    assert raised.group_contains(WeightsError, match="is missing")
    assert engine.version == (0, 1)
    assert Check(old_model)(await engine.generate(PROMPT, SHORT, seed=0)) < TOLERANCE
