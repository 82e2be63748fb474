"""Weights that an engine copies from the learner's memory on the same machine (here: /dev/shm)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from asyncrl.engines.inprocess import engine as inprocess
from asyncrl.errors import AsyncRLError, WeightsError
from asyncrl.messages import SamplingParams
from asyncrl.messages.codec import decode, encode
from asyncrl.messages.weight_transfer import BucketLayout, TransferOffer, TransferRequest
from asyncrl.os_process import process_space
from asyncrl.tensors.snapshot import Bucket, Kept, Snapshot
from asyncrl.weights import ipc
from asyncrl.weights.ipc import IPCOffer, IPCReceiver, IPCRequest
from asyncrl.weights.nccl import Sender
from asyncrl.weights.nccl_channel import CollectiveReceiver, NCCLChannel, NearestReceiver
from asyncrl.weights.port import Ask
from asyncrl.weights.ring import Ring
from tests.harness.engines import PROMPT, Check, Model
from tests.harness.transfers import copied, join, offering, receive, snapshot
from tests.harness.weights import OtherRank, in_parts

SHORT = SamplingParams(max_new_tokens=8, ignore_eos=True)
TOLERANCE = 1e-4


@pytest.fixture
def channel(tmp_path: Path, new_model: Model) -> NCCLChannel:
    """A channel whose learner holds the new model as version 0:2."""
    made = NCCLChannel(tmp_path / "weights", keep=2, model_path=new_model.folder, host="127.0.0.1", bucket_bytes=2**20)
    made.sender.set_weights(snapshot(new_model), incarnation=0, policy_version=2)
    return made


def request(**changed: str) -> TransferRequest:
    asks = IPCRequest(**{"space": process_space(), **changed})
    return TransferRequest(engine="w0", group="w0", num_ranks=1, has_joined=True, payload=encode(asks))


def count_shared(files: list[Path]) -> int:
    return sum(file.is_symlink() and "asyncrl-weights" in os.readlink(file) for file in files)


async def test_the_engine_samples_from_what_it_copied(
    engine: inprocess.InProcessEngine, channel: NCCLChannel, old_model: Model, new_model: Model
) -> None:
    assert Check(old_model)(await engine.generate(PROMPT, SHORT, seed=0)) < TOLERANCE
    receiver = channel.receiver(engine.weight_updater, engine="w0")
    assert isinstance(receiver, NearestReceiver)
    await join(receiver, channel.sender)
    report = await receive(receiver, channel.sender)
    assert 0 <= report.pause_seconds <= report.load_seconds
    assert engine.version == (0, 2)
    assert Check(new_model)(await engine.generate(PROMPT, SHORT, seed=0)) < TOLERANCE


async def test_the_engine_copies_what_is_kept(
    engine: inprocess.InProcessEngine, channel: NCCLChannel, new_model: Model
) -> None:
    kept = {
        name: Kept(shape=tuple(one.shape), dtype=one.dtype, device=one.device, source=one)
        for name, one in snapshot(new_model).tensors()
    }
    channel.sender.set_weights(Snapshot.from_tensors(kept.items()), incarnation=0, policy_version=3)
    receiver = channel.receiver(engine.weight_updater, engine="w0")
    assert receiver is not None
    await join(receiver, channel.sender)
    await receive(receiver, channel.sender)
    assert engine.version == (0, 3)
    assert Check(new_model)(await engine.generate(PROMPT, SHORT, seed=0)) < TOLERANCE


async def test_the_memory_is_kept_until_the_worker_has_disconnected(channel: NCCLChannel) -> None:
    transfer = channel.sender.begin(request())
    offer = decode(transfer.offer.payload, IPCOffer)
    files = [Path(bucket.file) for bucket in offer.buckets]
    sending = asyncio.create_task(asyncio.to_thread(transfer.send))
    with socket.socket(socket.AF_UNIX) as worker:
        worker.connect(offer.address)
        assert await asyncio.to_thread(worker.recv, 1)
        assert count_shared(files) == len(files) and not sending.done()
    await sending
    assert not count_shared(files)


@pytest.mark.parametrize("last", ["taken", "closed"])
async def test_shared_memory_is_counted_down_once_by_the_engine_that_took_it_or_by_the_learner(
    channel: NCCLChannel, monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    counted = list[ipc._Handover]()
    monkeypatch.setattr(ipc._Handover, "_let_go", lambda self: counted.append(self))
    transfer = channel.sender.begin(request())
    sending = asyncio.create_task(asyncio.to_thread(transfer.send))
    with socket.socket(socket.AF_UNIX) as worker:
        worker.connect(decode(transfer.offer.payload, IPCOffer).address)
        assert await asyncio.to_thread(worker.recv, 1)
        if last == "taken":
            worker.send(ipc._TAKEN)
    await sending
    assert len(counted) == (last == "closed")


def test_every_rank_of_an_engine_has_a_handle_with_a_counter_of_its_own(
    channel: NCCLChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes that counted down the same one would leave it at -1, and the memory of every version allocated."""
    counters = [f"counter {number}".encode() for number in range(2)]
    unused = iter(counters)
    monkeypatch.setattr(ipc, "_gpu_memory", lambda _: handle(next(unused)))
    monkeypatch.setattr(ipc, "_CONNECT_SECONDS", 0.01)
    on_gpu = cast(Any, SimpleNamespace(is_cuda=True, storage_offset=lambda: 0))
    handover = ipc._Handover(Snapshot.from_tensors([("w", torch.zeros(1))]), Ring(), num_ranks=2)
    shared = handover._share(Bucket(entries=(), data=on_gpu))
    counted = list[bytes]()
    monkeypatch.setattr(
        torch.UntypedStorage, "_release_ipc_counter_cuda", lambda counter, _: counted.append(counter), raising=False
    )
    with pytest.raises(WeightsError):
        handover.run(num_bytes=0)
    assert counted == counters

    mapped = list[bytes]()

    def map_gpu(_: ipc.SharedBucket, memory: ipc.GpuHandle, device: torch.device) -> torch.Tensor:
        mapped.append(memory.counter)
        return torch.empty(0)

    monkeypatch.setattr(ipc, "_map_gpu", map_gpu)
    payload = encode(IPCOffer(address="", buckets=(shared,)))
    for rank in range(2):
        monkeypatch.setattr(ipc, "_rank", lambda rank=rank: rank)
        assert not list(ipc.take_shared(payload, torch.device("cpu")))
    assert mapped == counters


def test_what_a_failed_engine_has_let_go_of_is_not_counted_down_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its counter would be at -1, and the memory allocated for good."""
    counters = Path(f"/dev/shm/torch_test_{os.getpid()}")
    counters.write_bytes(bytes(64) + b"".join(count.to_bytes(8, "little") for count in (1, 0, 1)))
    counted = list[int]()
    monkeypatch.setattr(
        torch.UntypedStorage, "_release_ipc_counter_cuda", lambda _, offset: counted.append(offset), raising=False
    )
    handover = ipc._Handover(Snapshot.from_tensors([("w", torch.zeros(1))]), Ring(), num_ranks=1)
    handover._handles += [replace(handle(f"/{counters.name}".encode()), counter_offset=offset) for offset in range(3)]
    try:
        handover.close()
    finally:
        counters.unlink()
    assert counted == [0, 2]


async def test_an_engine_copies_the_parts_of_all_ranks(
    engine: inprocess.InProcessEngine, channel: NCCLChannel, new_model: Model
) -> None:
    channel.sender.set_weights(in_parts(snapshot(new_model).tensors(), 3), incarnation=0, policy_version=3)
    receiver = channel.receiver(engine.weight_updater, engine="w0")
    assert receiver is not None
    await join(receiver, channel.sender)
    for _ in range(2):
        await receive(receiver, channel.sender)
    assert engine.version == (0, 3)
    assert Check(new_model)(await engine.generate(PROMPT, SHORT, seed=0)) < TOLERANCE


def test_every_bit_of_every_part_arrives() -> None:
    given = {f"w{number}": torch.randn(number + 1, 3).to(torch.bfloat16) for number in range(7)}
    sender = Sender("127.0.0.1")
    for version in range(2):
        sender.set_weights(in_parts(given.items(), 3), incarnation=0, policy_version=version)
        found = copied(sender)
        assert found.keys() == given.keys() and all(torch.equal(found[name], one) for name, one in given.items())


def test_no_rank_keeps_what_it_shared_if_another_cannot_share(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = list[ipc._Handover]()
    close = ipc._Handover.close
    monkeypatch.setattr(ipc._Handover, "close", lambda self: (closed.append(self), close(self)))
    exported = in_parts([(f"w{number}", torch.zeros(2)) for number in range(3)], 3)
    sender = Sender("127.0.0.1")
    sender.set_weights(exported, incarnation=0, policy_version=1)
    monkeypatch.setattr(ipc, "_CONNECT_SECONDS", 0.01)
    first = sender.begin(request())
    cast(OtherRank, exported.others[1]).dies = True
    with pytest.raises(AsyncRLError, match="learner rank 2"):
        sender.begin(request())
    assert len(closed) == 2
    cast(OtherRank, exported.others[1]).dies = False
    with pytest.raises(WeightsError, match="in time"):
        first.send()  # it is there on all ranks


def test_an_engine_that_asks_again_takes_what_it_was_offered_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """The learner may end the first transfer, whose offer came too late, while the engine takes the second."""
    monkeypatch.setattr(ipc, "_CONNECT_SECONDS", 0.01)
    sender = Sender("127.0.0.1")
    sender.set_weights(
        in_parts([(f"w{number}", torch.zeros(2)) for number in range(3)], 3), incarnation=0, policy_version=1
    )
    transfers = [sender.begin(request()) for _ in range(2)]
    offers = [decode(transfer.offer.payload, IPCOffer) for transfer in transfers]
    for number, transfer in enumerate(transfers):
        with pytest.raises(WeightsError, match="did not take its weights in time"):
            transfer.send()
        shared = [count_shared([Path(bucket.file) for bucket in offer.all_buckets]) for offer in offers]
        assert shared == [0, 3 * (number == 0)]


@pytest.mark.parametrize(
    ("gpus", "takes_broadcasts", "is_taken"),
    [("1", True, True), ("0,1", True, True), ("2", True, False), ("2", False, True), ("", True, True)],
)
def test_an_engine_that_shares_no_gpu_with_the_learner_joins_a_group_if_it_can(
    monkeypatch: pytest.MonkeyPatch, gpus: str, takes_broadcasts: bool, is_taken: bool
) -> None:
    """Two ranks, on GPUs 0 and 1."""
    names = iter("01")
    monkeypatch.setattr(ipc, "_check_reach", lambda *_: next(names))
    sender = Sender("127.0.0.1")
    sender.set_weights(in_parts([("v", torch.zeros(2)), ("w", torch.ones(2))]), incarnation=0, policy_version=1)
    asks = IPCRequest(space=process_space(), gpus=gpus, takes_broadcasts=takes_broadcasts)
    asked = TransferRequest(engine="w0", group="w0", num_ranks=1, payload=encode(asks))
    with contextlib.nullcontext() if is_taken else pytest.raises(WeightsError, match="w0 sees GPU 2 alone"):
        sender.begin(asked).send()


def test_memory_of_another_gpu_is_mapped_into_the_engines_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the engine needs neither to see that GPU nor a context there; an event of it cannot be waited for."""
    opened = list[tuple[Any, ...]]()

    def open_memory(*given: Any) -> Any:
        opened.append(given)
        raise RuntimeError("as far as it goes without a GPU")

    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(ipc, "_uuid", lambda number: f"gpu-{number}")
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", open_memory, raising=False)
    layout = BucketLayout(names=(), dtypes=(), shapes=())
    for gpu in ("gpu-1", "gpu-0"):
        memory = replace(handle(b"counter"), gpu=gpu, waits_for_event=True)
        with pytest.raises(RuntimeError, match="as far"):
            ipc._map_gpu(ipc.SharedBucket(layout=layout), memory, torch.device("cuda", 1))
    assert [(given[0], given[-1]) for given in opened] == [(1, True), (1, False)]


def handle(counter: bytes) -> ipc.GpuHandle:
    return ipc.GpuHandle(
        gpu="", handle=b"", num_bytes=0, offset=0, counter=counter, counter_offset=0, event=b"", waits_for_event=False
    )


async def test_a_receiver_says_to_every_rank_that_its_engine_took_the_weights(
    engine: inprocess.InProcessEngine, channel: NCCLChannel, new_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel.sender.set_weights(in_parts(snapshot(new_model).tensors(), 3), incarnation=0, policy_version=3)
    counted = list[ipc._Handover]()
    monkeypatch.setattr(ipc._Handover, "_let_go", lambda self: counted.append(self))
    receiver = channel.receiver(engine.weight_updater, engine="w0")
    assert receiver is not None
    await join(receiver, channel.sender)
    await receive(receiver, channel.sender)
    assert not counted


def test_a_worker_that_never_comes_costs_nothing_but_time(
    channel: NCCLChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ipc, "_CONNECT_SECONDS", 0.01)
    transfer = channel.sender.begin(request())
    with pytest.raises(WeightsError, match="did not take its weights in time"):
        transfer.send()
    assert not count_shared([Path(bucket.file) for bucket in decode(transfer.offer.payload, IPCOffer).buckets])


def test_engines_out_of_reach_are_told_why_and_load_folders(channel: NCCLChannel) -> None:
    with pytest.raises(WeightsError, match="w0 is on another machine"):
        channel.sender.begin(request(space="another machine"))


async def test_a_learner_that_is_gone_leaves_the_old_weights(
    engine: inprocess.InProcessEngine, channel: NCCLChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ipc, "_CONNECT_SECONDS", 0.01)
    transfer = channel.sender.begin(request())
    with pytest.raises(WeightsError):
        transfer.send()  # closes the socket and removes the files, as the end of the learner's process does
    with pytest.raises(WeightsError, match="cannot take the learner's weights"):
        await IPCReceiver(engine.weight_updater, engine="w0").receive(offering(transfer.offer))
    assert engine.version == (0, 1)


@pytest.mark.parametrize("gone", range(2))
async def test_a_worker_that_a_rank_of_the_learner_has_given_up_reads_no_memory(
    gone: int, engine: inprocess.InProcessEngine, channel: NCCLChannel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may reach the socket at the moment at which the rank closes it."""

    async def let_in(worker: asyncio.StreamReader, connection: asyncio.StreamWriter) -> None:
        connection.write(ipc._COME_IN)
        await worker.read()
        connection.close()

    monkeypatch.setattr(ipc, "_CONNECT_SECONDS", 0.01)
    transfer = channel.sender.begin(request())
    addresses = [str(tmp_path / str(rank)) for rank in range(2)]
    shared = replace(
        decode(transfer.offer.payload, IPCOffer),
        address=addresses[0],
        others=(IPCOffer(address=addresses[1], buckets=()),),
    )
    async with contextlib.AsyncExitStack() as ranks:
        for rank, address in enumerate(addresses):
            serve = let_in if rank != gone else lambda _, connection: connection.close()
            await ranks.enter_async_context(await asyncio.start_unix_server(serve, address))
        with pytest.raises(WeightsError, match="given this transfer up"):
            receiver = IPCReceiver(engine.weight_updater, engine="w0")
            await receiver.receive(offering(replace(transfer.offer, payload=encode(shared))))
    assert engine.version == (0, 1)
    with pytest.raises(WeightsError):
        transfer.send()


def test_every_rank_gives_the_engine_time_for_all_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    given = list[int]()
    monkeypatch.setattr(ipc._Handover, "run", lambda self, *, num_bytes: (given.append(num_bytes), self.close()))
    sender = Sender("127.0.0.1")
    tensors = [(f"w{number}", torch.zeros(2)) for number in range(3)]
    sender.set_weights(in_parts(tensors, 3), incarnation=0, policy_version=1)
    sender.begin(request()).send()
    assert given == [24] * 3


@pytest.mark.parametrize(("gpus", "problem"), [("0", ""), ("2", ""), ("0,1", "GPU 1 cannot reach the memory of GPU 0")])
def test_an_engine_whose_gpu_cannot_reach_the_learners_is_told_which(
    monkeypatch: pytest.MonkeyPatch, gpus: str, problem: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0, 1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: False)
    on_gpu = cast(Snapshot, SimpleNamespace(device=torch.device("cuda", 0)))
    with pytest.raises(WeightsError, match=problem) if problem else contextlib.nullcontext():
        assert ipc._check_reach(request(gpus=gpus), on_gpu) == "0"


class Unreachable(CollectiveReceiver):
    """As NCCL on one GPU."""

    async def join(self, ask: Ask) -> None:
        raise WeightsError("duplicate GPU")


async def test_a_learner_that_could_not_answer_is_asked_for_its_memory_again(
    engine: inprocess.InProcessEngine, channel: NCCLChannel
) -> None:
    async def nobody(request: TransferRequest) -> TransferOffer:
        raise WeightsError("no learner answers")

    ipc_receiver = IPCReceiver(engine.weight_updater, engine="w0")
    receiver = NearestReceiver(ipc_receiver, Unreachable(cast(Any, None), engine="w0"))
    with pytest.raises(WeightsError, match="duplicate GPU .nor can its memory be mapped: no learner answers"):
        await receiver.join(nobody)
    await join(receiver, channel.sender)
    await receive(receiver, channel.sender)
    assert engine.version == (0, 2)
