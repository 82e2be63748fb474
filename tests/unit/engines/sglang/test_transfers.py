"""Weight transfers from the learner's memory into SGLang: the requests that a fake server receives."""

from __future__ import annotations

import asyncio
import base64
import pickle
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from asyncrl.engines.sglang import weights as sglang_weights
from asyncrl.errors import EngineDied, WeightsError
from asyncrl.messages import SamplingParams
from asyncrl.weights.adapter import PullReceiver
from tests.harness.engines import PROMPT, Model
from tests.harness.fakes import until
from tests.harness.transfers import changed, collective_of, layouts, offering
from tests.unit.engines.sglang.attached import (
    BEGIN,
    BY_LOADER,
    CONTINUE,
    END,
    FROM_FOLDER,
    JOIN,
    LEAVE,
    PAUSE,
    UPDATE,
    Attach,
)

SHORT = SamplingParams(max_new_tokens=20, ignore_eos=True)


async def test_server_joins_with_ranks_after_the_learner(attach: Attach) -> None:
    attached = await attach()
    request = attached.receiver.request
    assert (request.engine, request.num_ranks, request.has_joined) == ("w7", 1, False)
    await attached.receiver.join(offering(attached.offer))
    assert attached.server.bodies(JOIN) == [
        {
            "master_address": "127.0.0.1",
            "master_port": collective_of(attached.offer).port,
            "rank_offset": 1,
            "world_size": 2,
            "group_name": request.group,
            "backend": "gloo",
        }
    ]
    assert attached.receiver.request == replace(request, has_joined=True)


@pytest.mark.parametrize("has_sessions", [True, False])
async def test_buckets_are_taken_in_order_while_the_server_is_paused(attach: Attach, has_sessions: bool) -> None:
    attached = await attach(has_sessions=has_sessions)
    await attached.join()
    report = await attached.receive()
    updates = [UPDATE] * len(collective_of(attached.offer).buckets)
    expected = [BEGIN, *updates, END] if has_sessions else updates
    assert attached.paths == [PAUSE, *expected, CONTINUE]
    assert [tuple(body["names"]) for body in attached.server.bodies(UPDATE)] == [
        bucket.names for bucket in collective_of(attached.offer).buckets
    ]
    assert attached.engine.version == (0, 4)
    assert 0 <= report.pause_seconds <= report.load_seconds


@pytest.mark.parametrize(
    "problem",
    [
        "Failed to update weights: EIO.\nRolling back to original weights.",  # by loading the same folder again
        "Weights were updated, but the cache was not flushed because requests are still running or queued.",
        "504 Gateway Time-out",
        "Failed to get weights iterator: ENOENT.",  # of one rank, or of the draft model
    ],
)
async def test_a_server_that_may_have_loaded_a_folder_stays_paused(attach: Attach, model: Model, problem: str) -> None:
    attached = await attach(info={"tp_size": 2})
    attached.server.refuses, attached.server.says = {(FROM_FOLDER, 1)}, problem
    with pytest.raises(WeightsError, match=problem[:20]):
        await attached.engine.load(model.version(4))
    assert attached.paths[-2:] == [PAUSE, FROM_FOLDER]
    assert attached.engine.version < (0, 0)
    await attached.engine.load(model.version(4))
    assert attached.paths[-1] == CONTINUE
    assert attached.engine.version == (0, 4)


async def test_the_last_bucket_alone_makes_it_that_version(attach: Attach) -> None:
    attached = await attach()
    await attached.join()
    await attached.receive()
    versions = [body.get("weight_version") for body in attached.server.bodies(UPDATE)]
    assert len(versions) > 2
    assert versions == [None] * (len(versions) - 1) + [attached.stamp((0, 4))]


@pytest.mark.parametrize(("pause", "is_flushed"), [("in_place", False), ("retract", True)])
async def test_keys_are_flushed_only_when_requests_are_retracted(attach: Attach, pause: str, is_flushed: bool) -> None:
    attached = await attach(pause=pause)
    await attached.join()
    await attached.receive()
    assert {body["flush_cache"] for body in attached.server.bodies(UPDATE)} == {is_flushed}


async def test_a_torn_update_keeps_the_server_paused(attach: Attach) -> None:
    attached = await attach()
    await attached.join()
    group = attached.receiver.request.group
    attached.server.refuses = {(UPDATE, 2)}
    with pytest.raises(WeightsError, match="torn"):
        await attached.receive()
    assert attached.paths == [PAUSE, BEGIN, UPDATE, UPDATE, LEAVE]
    assert attached.server.bodies(LEAVE) == [{"group_name": group}]
    assert attached.engine.version < (0, 0)  # no version: any weights are newer
    waiting = asyncio.ensure_future(attached.engine.generate(PROMPT, SHORT, seed=0))
    await until(lambda: attached.engine.stats().queued == 1)
    assert "/generate" not in attached.paths
    waiting.cancel()


async def test_a_folder_brings_a_torn_server_back(attach: Attach, model: Model) -> None:
    attached = await attach()
    await attached.join()
    attached.server.refuses = {(UPDATE, 2)}
    with pytest.raises(WeightsError):
        await attached.receive()
    attached.server.asked.clear()
    await attached.engine.load(model.version(4))
    assert attached.paths == [PAUSE, END, FROM_FOLDER, CONTINUE]
    assert attached.engine.version == (0, 4)
    assert len((await attached.engine.generate(PROMPT, SHORT, seed=0)).tokens)


@pytest.mark.parametrize(
    ("problem", "ranks"),
    [("Failed to get model loader: GGUF.", 2), ("Failed to get weights iterator: ENOENT.", 1)],
)
async def test_a_server_that_refuses_a_folder_goes_on(attach: Attach, model: Model, problem: str, ranks: int) -> None:
    attached = await attach(info={"tp_size": ranks})
    attached.server.refuses, attached.server.says = {(FROM_FOLDER, 1)}, problem
    with pytest.raises(WeightsError):
        await attached.engine.load(model.version(4))
    assert attached.paths[-3:] == [PAUSE, FROM_FOLDER, CONTINUE]
    assert attached.engine.version == (0, 3)


async def test_refuses_weights_of_another_model_before_pausing(attach: Attach, model: Model) -> None:
    """The learner is already sending, so the engine leaves the group to end the broadcast."""
    attached = await attach()
    await attached.join()
    with pytest.raises(WeightsError, match="missing"):
        await attached.receiver.receive(offering(changed(attached.offer, buckets=layouts(model)[1:])))
    assert attached.paths == [LEAVE]
    assert attached.engine.version == (0, 3)


@pytest.mark.parametrize("failure", ["join", "update"])
async def test_rejoins_under_a_new_name_after_a_failure(attach: Attach, failure: str) -> None:
    attached = await attach()
    first = attached.receiver.request.group
    attached.server.refuses = {(JOIN if failure == "join" else UPDATE, 1)}
    with pytest.raises(WeightsError):
        await attached.receiver.join(offering(attached.offer))
        await attached.receive()
    request = attached.receiver.request
    assert request.group != first
    assert not request.has_joined


@pytest.mark.parametrize("path", [JOIN, UPDATE])
async def test_server_stuck_in_a_collective_is_dead(attach: Attach, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is inside a collective that never returns, so it does nothing else."""
    attached = await attach()
    if path == UPDATE:
        await attached.join()  # a busy machine may need time for this
    monkeypatch.setattr(sglang_weights, "_STUCK_SECONDS", 2.0)
    attached.server.hangs = path
    hint = "reach the learner at 127.0.0.1:\\d+ .weights.options.host" if path == JOIN else "did not send its weights"
    with pytest.raises(EngineDied, match=hint):
        await (attached.join() if path == JOIN else attached.receive())
    assert CONTINUE not in attached.paths


def source(payload: bytes, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """The source of a weight channel whose engines fetch. The server calls it; the server here is fake."""
    raise AssertionError


async def test_server_gets_the_function_of_a_pull_channel(attach: Attach) -> None:
    attached = await attach()
    attached.engine._loader.ranks_with_loader = 2
    attached.server.asked.clear()
    offer = replace(attached.offer, payload=b"where")
    await PullReceiver(attached.engine.weight_updater, source, engine="w7").receive(offering(offer))
    assert attached.paths == [PAUSE, BEGIN, BY_LOADER, END, CONTINUE]
    first, second = attached.server.bodies(BY_LOADER)[0]["serialized_named_tensors"]
    assert first == second
    names = [name for name, _ in pickle.loads(base64.b64decode(first))]
    assert names[:2] == [f"source:{__name__}:source", base64.b64encode(b"where").decode()]
    assert attached.engine.version == (0, 4)
