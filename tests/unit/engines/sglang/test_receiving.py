"""Buckets that a server receives while it loads: every tensor is right, and memory is bounded."""

from __future__ import annotations

import base64
import io
import multiprocessing
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from asyncrl.engines.sglang import loader, receiving
from asyncrl.engines.sglang.destinations import Destinations
from asyncrl.messages.codec import encode
from asyncrl.messages.weight_transfer import BucketLayout, TransferRequest
from asyncrl.tensors.snapshot import Bucket, Snapshot
from asyncrl.weights.nccl import CollectiveRequest, Sender, group_of_part
from tests.harness.nccl import PATIENCE, join_group
from tests.harness.transfers import collective_of
from tests.harness.weights import OtherRank, in_parts

CPU = torch.device("cpu")
Weights = Iterable[tuple[str, torch.Tensor]]


class Network(torch.nn.Linear):
    """Records its tensors.  keeps: how many it keeps before it copies the first of them; 0 copies each at once"""

    def __init__(self, keeps: int) -> None:
        super().__init__(1, 1)
        self.keeps, self.calls = keeps, 0
        self.taken: dict[str, torch.Tensor] = {}

    def load_weights(self, weights: Weights) -> None:
        self.calls += 1
        kept: deque[tuple[str, torch.Tensor]] = deque()
        for item in weights:
            kept.append(item)
            if len(kept) > self.keeps:
                self._copy(kept.popleft())
        for item in kept:
            self._copy(item)

    def _copy(self, item: tuple[str, torch.Tensor]) -> None:
        name, tensor = item
        assert name not in self.taken
        self.taken[name] = tensor.clone()


ALL = 10**9
KEEPS = (0, 1, 3, ALL)


def tensors(seed: int) -> dict[str, torch.Tensor]:
    """Forty tensors of odd sizes and three types; one is larger than any bucket, and one is empty."""
    generator = torch.Generator().manual_seed(seed)
    given = {f"wide.{n}": torch.randn(1 + n % 7, 31, generator=generator) for n in range(30)}
    given |= {f"half.{n}": torch.randn(3 + n, generator=generator).bfloat16() for n in range(7)}
    given["large"] = torch.randn(77, 91, generator=generator)
    given["empty"] = torch.empty(0, 4)
    given["flags"] = torch.randint(0, 255, (5, 3), generator=generator, dtype=torch.uint8)
    return given


def check_same(found: dict[str, torch.Tensor], given: dict[str, torch.Tensor]) -> None:
    assert found.keys() == given.keys()
    for name, tensor in given.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].cpu(), tensor), name


def decoded(instruction: str) -> list[tuple[str, torch.Tensor]]:
    """Decode an instruction as SGLang does."""
    return [(name, tensor.to(CPU)) for name, tensor in pickle.loads(base64.b64decode(instruction))]


# -- between processes -------------------------------------------------------------------------------------------------


def serve_rank(commands: Connection, rank: int, size: int, device: str) -> None:
    """Process target: a rank of a server, which joins groups and runs instructions of the loader."""
    groups = []
    if device != "cpu":
        torch.cuda.set_device(device)
    while True:
        kind, *arguments = commands.recv()
        if kind == "join":
            groups.append(join_group(*arguments, rank=rank, size=size))
            commands.send(b"")
        else:
            instruction, keeps = arguments
            network = Network(keeps).to(device)
            loader.load(network, decoded(instruction))
            written = io.BytesIO()
            torch.save({name: tensor.cpu() for name, tensor in network.taken.items()}, written)
            commands.send(written.getvalue())


class Ranks:
    """The ranks of one server, each in its own process."""

    def __init__(self, count: int, device: str = "cpu") -> None:
        context: Any = multiprocessing.get_context("forkserver" if device == "cpu" else "spawn")
        self.count = count
        self._threads = ThreadPoolExecutor(count)
        self._processes, self._commands = [], []
        for rank in range(1, count + 1):
            ours, theirs = context.Pipe()
            self._processes.append(
                context.Process(target=serve_rank, args=(theirs, rank, count + 1, device), daemon=True)
            )
            self._processes[-1].start()
            self._commands.append(ours)

    def told(self, *command: Any) -> list[bytes]:
        """Tell all ranks, and return their answers."""

        def tell(commands: Connection) -> bytes:
            commands.send(command)
            assert commands.poll(PATIENCE)
            return bytes(commands.recv())

        return list(self._threads.map(tell, self._commands))

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._threads.shutdown()


@pytest.fixture(params=[1, 2])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    multiprocessing.get_context("forkserver").set_forkserver_preload(["tests.unit.engines.sglang.test_receiving"])
    made = Ranks(request.param)
    yield made
    made.close()


def newer(held: Snapshot, given: dict[str, torch.Tensor]) -> Snapshot:
    """Export other tensors on the same ranks of the learner."""
    made = in_parts(given.items(), 1 + len(held.others))
    for mine, other in zip(held.others, made.others, strict=True):
        assert isinstance(mine, OtherRank) and isinstance(other, OtherRank)
        mine.snapshot = other.snapshot
    return replace(made, others=held.others)


def check_versions(ranks: Ranks, problem: Path, *, device: str) -> None:
    """Send one version after the other through the same groups, from three ranks of the learner."""
    sender = Sender("127.0.0.1", bucket_bytes=2000 if device == "cuda:0" else 500, patience_seconds=PATIENCE)

    def given(seed: int) -> dict[str, torch.Tensor]:
        return {name: tensor.to(device) for name, tensor in tensors(seed).items()}

    held = in_parts(given(0).items(), 3)
    sender.set_weights(held, incarnation=0, policy_version=0)
    payload = encode(CollectiveRequest(buckets_at_once=receiving.AT_ONCE))
    request = TransferRequest(engine="w0", group="w0-1", num_ranks=ranks.count, payload=payload)
    with ThreadPoolExecutor(1) as thread:
        meeting = sender.begin(request)
        sending = thread.submit(meeting.send)
        own = collective_of(meeting.offer)
        for number, found in enumerate((own, *own.others)):
            ranks.told("join", group_of_part("w0-1", number), found.host, found.port, found.collective)
        sending.result(PATIENCE)
        for seed, keeps in enumerate(KEEPS):
            sender.set_weights(newer(held, given(seed)), incarnation=0, policy_version=seed)
            transfer = sender.begin(replace(request, has_joined=True))
            own = collective_of(transfer.offer)
            assert len(own.buckets) > receiving.AT_ONCE
            parts = [(group_of_part("w0-1", number), one.buckets) for number, one in enumerate((own, *own.others))]
            sending = thread.submit(transfer.send)
            for written in ranks.told("load", loader.serialize_groups(parts, problem=problem), keeps):
                check_same(torch.load(io.BytesIO(written)), tensors(seed))
            sending.result(PATIENCE)
    assert not problem.exists()


@pytest.mark.slow
@pytest.mark.xdist_group("nccl")
def test_every_rank_of_a_server_gets_the_tensors_of_all_groups(ranks: Ranks, tmp_path: Path) -> None:
    check_versions(ranks, tmp_path / "problem", device="cpu")


@pytest.mark.gpu(2)
def test_over_nccl_a_server_on_another_gpu_gets_the_tensors_of_all_groups(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")  # as in adapters/registry.py
    ranks = Ranks(1, "cuda:1")
    try:
        check_versions(ranks, tmp_path / "problem", device="cuda:0")
    finally:
        ranks.close()


def test_a_group_that_the_server_does_not_have_leaves_the_weights_and_a_reason(tmp_path: Path) -> None:
    network = Network(0)
    layout = BucketLayout(names=("a",), dtypes=("float32",), shapes=((2,),))
    instruction = loader.serialize_groups([("w0-nowhere", [layout])], problem=tmp_path / "problem")
    loader.load(network, decoded(instruction))
    assert network.calls == 0
    reason = (tmp_path / "problem").read_text()
    assert "w0-nowhere" in reason
    assert "\n" not in reason


# -- in this process, with other broadcasts ----------------------------------------------------------------------------


class Broadcasts:
    """Stands for ``dist.broadcast``: copies the next bucket into the given memory, after ``before``."""

    def __init__(self, buckets: Sequence[Bucket], before: Callable[[], None] = lambda: None) -> None:
        self._next = iter(buckets)
        self._before = before
        self._made: list[StorageWeakRef] = []
        self.at_once: list[int] = []
        """Buckets in memory at each broadcast."""

    def __call__(self, data: torch.Tensor, *, src: int, group: Any) -> None:
        assert (src, group) == (0, "group")
        self._made.append(StorageWeakRef(data.untyped_storage()))  # type: ignore[no-untyped-call]
        self.at_once.append(sum(not one.expired() for one in self._made))  # type: ignore[no-untyped-call]
        self._before()
        data.copy_(next(self._next).data, non_blocking=True)


def arriving(buckets: Sequence[Bucket], device: torch.device = CPU) -> receiving.Arrivals:
    return receiving.Arrivals([("group", bucket.entries) for bucket in buckets], device)


@pytest.mark.parametrize("keeps", KEEPS)
def test_a_model_may_keep_tensors_and_few_buckets_are_in_memory(monkeypatch: pytest.MonkeyPatch, keeps: int) -> None:
    snapshot = Snapshot.from_tensors(tensors(0).items(), bucket_bytes=500)
    broadcast = Broadcasts(snapshot.buckets)
    monkeypatch.setattr(receiving.dist, "broadcast", broadcast)
    network = Network(keeps)
    arriving(snapshot.buckets).load_into(network)
    check_same(network.taken, tensors(0))
    assert len(broadcast.at_once) == len(snapshot.buckets) > 10
    assert max(broadcast.at_once) <= receiving.AT_ONCE
    if keeps == 0:
        assert network.calls == 1  # one call has less to do in Python


class Holder(torch.nn.Module):
    """Copies each tensor into its parameter; what it makes of those in half precision is left to load_weights."""

    def __init__(self, given: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in given.items():
            self.register_parameter(name.replace(".", "_"), torch.nn.Parameter(torch.zeros_like(tensor)))

    def load_weights(self, weights: Weights) -> None:
        for name, tensor in weights:
            parameter = self.get_parameter(name.replace(".", "_")).data
            parameter.copy_(tensor if tensor.dtype == torch.float32 else 1 * tensor)


def check_straight(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, torch.Tensor], before: Callable[[], None], *, bucket_bytes: int
) -> None:
    """Load three versions, of which two are copied straight to their places."""
    device = next(iter(given.values())).device
    model, known = Holder(given), Destinations()
    for _ in range(3):
        given = {name: tensor + 1 for name, tensor in given.items()}
        snapshot = Snapshot.from_tensors(given.items(), bucket_bytes=bucket_bytes)
        broadcast = Broadcasts(snapshot.buckets, before)
        monkeypatch.setattr(receiving.dist, "broadcast", broadcast)
        with known.loading(model) as target:
            arriving(snapshot.buckets, device).load_into(target)
        found = {name: model.get_parameter(name.replace(".", "_")).data for name in given}
        check_same(found, {name: tensor.cpu() for name, tensor in given.items()})
        assert max(broadcast.at_once) <= receiving.AT_ONCE


@pytest.mark.parametrize("bucket_bytes", [40, 500])
def test_versions_that_are_copied_straight_keep_few_buckets_in_memory(
    monkeypatch: pytest.MonkeyPatch, bucket_bytes: int
) -> None:
    given = {name: tensor for name, tensor in tensors(0).items() if tensor.is_floating_point()}
    check_straight(monkeypatch, given, lambda: None, bucket_bytes=bucket_bytes)


@pytest.mark.gpu
def test_on_a_gpu_late_buckets_are_copied_straight(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    given = {f"layer.{n}": torch.randn(512, 1024 + n, generator=generator).cuda() for n in range(48)}
    given |= {f"half.{n}": torch.randn(512, n + 1, generator=generator).cuda().bfloat16() for n in range(9)}
    check_straight(monkeypatch, given, lambda: torch.cuda._sleep(2_000_000), bucket_bytes=8 * 2**20)


@pytest.mark.gpu
@pytest.mark.parametrize("late", ["broadcast", "model", "both"])
def test_on_a_gpu_no_bucket_is_overwritten_or_read_too_early(monkeypatch: pytest.MonkeyPatch, late: str) -> None:
    """Work on either stream, or on both, is late, and few blocks are used for many buckets."""
    device = torch.device("cuda", 0)
    generator = torch.Generator().manual_seed(0)
    given = {f"layer.{n}": torch.randn(512, 1024 + n, generator=generator) for n in range(48)}
    snapshot = Snapshot.from_tensors([(n, t.to(device)) for n, t in given.items()], bucket_bytes=8 * 2**20)

    def sleep() -> None:
        torch.cuda._sleep(2_000_000)

    class Late(Network):
        def _copy(self, item: tuple[str, torch.Tensor]) -> None:
            if late != "broadcast":
                sleep()
            super()._copy(item)

    for keeps in KEEPS:
        broadcast = Broadcasts(snapshot.buckets, before=sleep if late != "model" else lambda: None)
        monkeypatch.setattr(receiving.dist, "broadcast", broadcast)
        network = Late(keeps)
        arriving(snapshot.buckets, device).load_into(network)
        torch.cuda.synchronize(device)
        check_same(network.taken, given)
        assert max(broadcast.at_once) <= receiving.AT_ONCE
