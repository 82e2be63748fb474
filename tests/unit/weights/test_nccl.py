"""Weights from the learner's memory, over gloo: what arrives, and what remains when an engine dies."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.data.tiny_model import make_tiny_model
from asyncrl.errors import WeightsError
from asyncrl.messages.codec import encode
from asyncrl.messages.weight_transfer import BucketLayout, TransferOffer, TransferRequest
from asyncrl.tensors.snapshot import Kept, Snapshot
from asyncrl.weights import nccl
from asyncrl.weights.nccl import CollectiveOffer, Sender
from asyncrl.weights.nccl_channel import CollectiveReceiver, NCCLChannel
from asyncrl.weights.port import Transfer
from tests.harness.nccl import PATIENCE, Peer
from tests.harness.transfers import collective_of, offering
from tests.harness.weights import OtherRank, in_parts

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("nccl")]  # each engine is a process
BRIEF_SECONDS = 6.0
"""For engines that die. Those that live must join within it, on a busy machine too."""


@pytest.fixture(scope="module", autouse=True)
def fork_server() -> None:
    """Import torch once for all peers, and what Megatron's ranks need, because a process has one fork server."""
    modules = ["tests.harness.nccl", "asyncrl.backends.megatron.rank", "transformers.models.auto"]
    multiprocessing.get_context("forkserver").set_forkserver_preload(modules)


@pytest.fixture
def peers() -> Iterator[Any]:
    """Yield ``peers("w0")``, which makes an engine that is gone after the test."""
    made: list[Peer] = []

    def make(engine: str = "w0", group: str = "") -> Peer:
        made.append(Peer(engine, group))
        return made[-1]

    yield make
    for peer in made:
        peer.close()


def weights(seed: int, *, device: str = "cpu") -> Snapshot:
    """Five tensors of three types in four buckets."""
    generator = torch.Generator().manual_seed(seed)
    wide = [(f"wide.{n}", torch.randn(7, 30, generator=generator)) for n in range(3)]  # 840 bytes each
    narrow = ("narrow", torch.randn(11, generator=generator).bfloat16())
    flags = ("flags", torch.randint(0, 255, (5, 3), generator=generator, dtype=torch.uint8))
    given = [(name, tensor.to(device)) for name, tensor in (*wide, narrow, flags)]
    return Snapshot.from_tensors(given, bucket_bytes=1700)


def bytes_of(snapshot: Snapshot) -> list[bytes]:
    return [bucket.filled().data.cpu().numpy().tobytes() for bucket in snapshot.buckets]


def buckets_of(transfer: Transfer) -> tuple[BucketLayout, ...]:
    """Return the buckets that the engine is told to expect."""
    return collective_of(transfer.offer).buckets


def holding(snapshot: Snapshot, *, version: int = 1, patience_seconds: float = PATIENCE) -> Sender:
    sender = Sender("127.0.0.1", patience_seconds=patience_seconds)
    sender.set_weights(snapshot, incarnation=0, policy_version=version)
    return sender


# -- transfers ---------------------------------------------------------------------------------------------------------


def test_sends_snapshot_bucket_by_bucket(peers: Any) -> None:
    snapshot = weights(0)
    sender, peer = holding(snapshot, version=3), peers()
    peer.meet(sender)
    transfer = sender.begin(peer.joined)
    assert transfer.offer.version == (0, 3)
    assert [len(layout.names) for layout in buckets_of(transfer)] == [2, 1, 1, 1]
    assert buckets_of(transfer)[2] == BucketLayout(names=("narrow",), dtypes=("bfloat16",), shapes=((11,),))
    with ThreadPoolExecutor(1) as thread:
        sending = thread.submit(transfer.send)
        assert [peer.take(layout).result(PATIENCE) for layout in buckets_of(transfer)] == bytes_of(snapshot)
        sending.result(PATIENCE)


@pytest.mark.gpu(2)
def test_sends_snapshot_over_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")  # as in adapters/registry.py
    snapshot = weights(0, device="cuda:0")
    peer, sender = Peer(devices=["cuda:1"]), holding(snapshot)
    try:
        peer.meet(sender)
        for _ in range(2):
            assert peer.receive(sender) == bytes_of(snapshot)
    finally:
        peer.close()


def test_refuses_nccl_without_cumem_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise our thread may wait inside NCCL, where no timeout of ours ends it."""
    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    monkeypatch.setattr(nccl, "_kind_of", lambda snapshot: "nccl")
    with pytest.raises(WeightsError, match="NCCL_CUMEM_ENABLE is not set"):
        holding(weights(0)).begin(TransferRequest(engine="w0", group="w0-1", num_ranks=1))


def test_each_rank_sends_its_part(peers: Any) -> None:
    """Two ranks, with one group each: the engine receives their buckets, one rank after the other."""
    whole = weights(0)
    exported = in_parts(whole.tensors())
    sender, peer = Sender("127.0.0.1", patience_seconds=PATIENCE), peers()
    sender.set_weights(exported, incarnation=0, policy_version=1)
    peer.meet(sender)
    (other,) = exported.others
    assert isinstance(other, OtherRank)
    for _ in range(2):
        assert peer.receive(sender) == bytes_of(exported) + bytes_of(other.snapshot)
    sender.forget(engines=["w0"])


def test_sends_what_is_kept_beside_copies(peers: Any) -> None:
    given = dict(weights(0).tensors())
    kept = {
        name: Kept(shape=tuple(one.shape), dtype=one.dtype, device=one.device, source=one)
        for name, one in given.items()
        if name != "wide.1"
    }
    snapshot = Snapshot.from_tensors([*(given | kept).items()], bucket_bytes=1700)
    sender, peer = holding(snapshot), peers()
    peer.meet(sender)
    for _ in range(2):
        assert peer.receive(sender) == bytes_of(snapshot)
    for name, tensor in snapshot.tensors():
        assert torch.equal(tensor, given[name])
    assert [bucket.is_kept for bucket in snapshot.buckets] == [True, False, True, True]


def test_each_transfer_sends_newest_weights(peers: Any) -> None:
    sender, peer = holding(weights(0)), peers()
    peer.meet(sender)
    for seed in (0, 1, 2):
        sender.set_weights(weights(seed), incarnation=0, policy_version=seed)
        assert peer.receive(sender) == bytes_of(weights(seed))


def test_transfer_sends_the_offered_version(peers: Any) -> None:
    sender, peer = holding(weights(0), version=0), peers()
    peer.meet(sender)
    transfer = sender.begin(peer.joined)
    sender.set_weights(weights(1), incarnation=0, policy_version=1)
    with ThreadPoolExecutor(1) as thread:
        sending = thread.submit(transfer.send)
        taken = [peer.take(layout).result(PATIENCE) for layout in buckets_of(transfer)]
        sending.result(PATIENCE)
    assert transfer.offer.policy_version == 0
    assert taken == bytes_of(weights(0))


def test_slow_engine_does_not_delay_another(peers: Any) -> None:
    """The second engine is served completely while the first engine's transfer is open."""
    sender, slow, quick = holding(weights(0)), peers("w0"), peers("w1")
    slow.meet(sender)
    quick.meet(sender)
    transfer = sender.begin(slow.joined)
    with ThreadPoolExecutor(1) as thread:
        sending = thread.submit(transfer.send)
        assert quick.receive(sender) == bytes_of(weights(0))
        assert [slow.take(layout).result(PATIENCE) for layout in buckets_of(transfer)] == bytes_of(weights(0))
        sending.result(PATIENCE)


# -- engines that die --------------------------------------------------------------------------------------------------


def test_gives_up_engine_that_dies_before_joining(peers: Any) -> None:
    sender, dead, alive = holding(weights(0), patience_seconds=BRIEF_SECONDS), peers("w0"), peers("w1")
    alive.meet(sender)
    transfer = sender.begin(dead.request)
    dead.kill()
    with pytest.raises(WeightsError, match=dead.request.group):
        transfer.send()
    assert alive.receive(sender) == bytes_of(weights(0))


@pytest.mark.parametrize("fate", ["killed", "frozen"])
def test_lost_engine_breaks_only_its_own_group(peers: Any, fate: str) -> None:
    sender, lost, alive = holding(weights(0), patience_seconds=BRIEF_SECONDS), peers("w0"), peers("w1")
    lost.meet(sender)
    alive.meet(sender)
    transfer = sender.begin(lost.joined)
    with ThreadPoolExecutor(1) as thread:
        sending = thread.submit(transfer.send)
        assert lost.take(buckets_of(transfer)[0]).result(PATIENCE) == bytes_of(weights(0))[0]
        lost.kill() if fate == "killed" else lost.freeze()
        assert alive.receive(sender) == bytes_of(weights(0))
        with pytest.raises(WeightsError, match=lost.request.group):
            sending.result(PATIENCE)
    assert alive.receive(sender) == bytes_of(weights(0))
    with pytest.raises(WeightsError, match="broken"):
        sender.begin(lost.joined)


def test_restarted_engine_gets_a_new_group(peers: Any) -> None:
    """Even while the learner is still busy with the previous one."""
    sender, first = holding(weights(0), patience_seconds=BRIEF_SECONDS), peers("w0")
    first.meet(sender)
    transfer = sender.begin(first.joined)
    with ThreadPoolExecutor(1) as thread:
        sending = thread.submit(transfer.send)
        first.take(buckets_of(transfer)[0]).result(PATIENCE)
        first.freeze()
        second = peers("w0")
        second.meet(sender)
        assert second.receive(sender) == bytes_of(weights(0))
        with pytest.raises(WeightsError):
            sending.result(PATIENCE)
    assert second.receive(sender) == bytes_of(weights(0))


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_restarted_learner_asks_engine_to_join_again(peers: Any) -> None:
    peer = peers()
    peer.meet(holding(weights(0)))
    restarted = holding(weights(0))
    with pytest.raises(WeightsError, match="join again"):
        restarted.begin(peer.joined)
    again = peers(group="w0-again")
    again.meet(restarted)
    assert again.receive(restarted) == bytes_of(weights(0))


class _OnTheLearnersGpu:
    """The updater of a server whose NCCL refuses to connect to a learner on its GPU."""

    num_ranks, buckets_at_once, can_update = 1, 1, False

    def __init__(self) -> None:
        self.joined: list[str] = []
        self.left: list[str] = []

    async def join(self, group: str, *, host: str, port: int, kind: str) -> None:
        self.joined.append(group)

    async def receive(self, version: tuple[int, int], parts: Any) -> Any:
        raise WeightsError("400: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 70")

    async def leave(self, group: str) -> None:
        self.left.append(group)


async def test_an_engine_on_the_learners_gpu_that_cannot_map_its_memory_joins_once() -> None:
    """Each group that NCCL refuses takes memory of the server. What the worker does then: it loads folders."""
    updater: Any = _OnTheLearnersGpu()
    receiver = CollectiveReceiver(updater, engine="w0")
    async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0) as learner:
        port = learner.sockets[0].getsockname()[1]
        offer = CollectiveOffer(host="127.0.0.1", port=port, collective="nccl", buckets=())
        ask = offering(TransferOffer(payload=encode(offer)))
        await receiver.join(ask)
        with pytest.raises(WeightsError, match='use weights.channel = "files"'):
            await receiver.receive(ask)
        with pytest.raises(WeightsError, match="w0 is on the learner's GPU"):
            await receiver.join(ask)
    assert len(updater.joined) == 1 and updater.left == updater.joined


# -- the channel -------------------------------------------------------------------------------------------------------


def test_channel_also_writes_folders(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", seed=0)
    channel = NCCLChannel(tmp_path / "weights", keep=2, model_path=model, host="127.0.0.1", bucket_bytes=1000)
    version = channel.publish(weights(0), incarnation=0, policy_version=1)
    assert version.version == (0, 1)
    assert channel.verify(version) == Path(version.uri)
    with pytest.raises(WeightsError, match="yet"):
        channel.sender.begin(TransferRequest(engine="w0", group="w0-1", num_ranks=1))  # publishing holds them, too
