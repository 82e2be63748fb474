"""Weights that arrive over NCCL are one order to our loader in the server: the requests that a fake server receives."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.engines.sglang import weights as sglang_weights
from asyncrl.errors import WeightsError
from tests.harness.engines import Model
from tests.harness.transfers import changed, collective_of
from tests.unit.engines.sglang.attached import (
    BEGIN,
    BY_LOADER,
    CONTINUE,
    END,
    PAUSE,
    UPDATE,
    Attach,
    Attached,
)


async def with_loader(attached: Attached) -> None:
    """Give the server our loader and have it join the learner over NCCL."""
    attached.engine._loader.ranks_with_loader = 2
    attached.offer = changed(attached.offer, collective="nccl")
    await attached.join()


async def test_over_nccl_our_loader_receives_all_buckets_of_all_groups_in_one_order(attach: Attach) -> None:
    attached = await attach()
    own = collective_of(attached.offer)
    half = len(own.buckets) // 2
    other = replace(own, collective="nccl", buckets=own.buckets[half:])
    attached.offer = changed(attached.offer, buckets=own.buckets[:half], others=(other,))
    await with_loader(attached)
    group = attached.receiver.request.group
    await attached.receive()
    assert attached.paths == [PAUSE, BEGIN, BY_LOADER, END, CONTINUE]
    ((kind, described, _),) = attached.server.loader_orders()
    assert kind == "groups"
    told = json.loads(described)
    assert [name for name, _ in told] == [group, f"{group}.1"]
    assert [names for _, buckets in told for names, _, _ in buckets] == [list(one.names) for one in own.buckets]
    assert attached.server.bodies(BY_LOADER)[0]["weight_version"] == attached.stamp((0, 4))
    assert attached.engine.version == (0, 4)


@pytest.mark.parametrize("reason", ["over gloo", "no loader"])
async def test_otherwise_sglang_receives_bucket_by_bucket(attach: Attach, reason: str) -> None:
    attached = await attach()
    if reason == "over gloo":
        attached.engine._loader.ranks_with_loader = 2
    else:
        attached.offer = changed(attached.offer, collective="nccl")
    await attached.join()
    await attached.receive()
    assert attached.paths.count(UPDATE) == len(collective_of(attached.offer).buckets)
    assert BY_LOADER not in attached.paths


async def test_a_loader_that_does_not_find_the_group_is_replaced_by_sglangs(
    attach: Attach, model: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The first transfer fails with one line, a folder takes its place, and the next transfer works."""
    attached = await attach()
    await with_loader(attached)
    problems = tmp_path / "problems"
    await asyncio.to_thread(problems.mkdir)
    monkeypatch.setattr(sglang_weights.tempfile, "gettempdir", lambda: str(problems))
    post = attached.engine._loader._post

    async def without_group(path: str, body: Mapping[str, Any]) -> Any:
        answer = await post(path, body)
        if path == BY_LOADER:
            (*_, problem) = attached.server.loader_orders()[-1]
            await asyncio.to_thread(Path(problem).write_text, "no such group: w7")
        return answer

    monkeypatch.setattr(attached.engine._loader, "_post", without_group)
    with pytest.raises(WeightsError, match="cannot receive: no such group: w7; from now on SGLang's does$"):
        await attached.receive()
    assert not await asyncio.to_thread(os.listdir, problems)
    assert CONTINUE not in attached.paths
    monkeypatch.undo()
    await attached.engine.load(model.version(4))
    assert attached.paths[-1] == CONTINUE
    await attached.join()
    await attached.receive()
    assert UPDATE in attached.paths
    assert BY_LOADER not in attached.paths
    assert attached.engine.version == (0, 4)
