"""Weights that arrive over NCCL are one instruction to our loader in the server: the requests that a fake server
receives."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

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
    ((kind, described, _),) = attached.server.loader_instructions()
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
