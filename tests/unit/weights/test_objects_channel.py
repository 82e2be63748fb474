"""Weights through the object store: what each host fetches, and what happens if objects are missing or wrong."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from asyncrl.actors.rollout.weight_follower import WeightFollower
from asyncrl.bus.memory.bus import MemoryBus
from asyncrl.bus.memory.stores import Objects
from asyncrl.data.tiny_model import make_tiny_model
from asyncrl.errors import BusError, WeightsError
from asyncrl.messages import WeightVersion, replace
from asyncrl.messages.topics import WEIGHTS
from asyncrl.tensors.snapshot import Snapshot
from asyncrl.tensors.weight_files import WEIGHTS_FILE
from asyncrl.weights.objects_channel import ObjectsChannel
from asyncrl.weights.port import LoadReport
from asyncrl.weights.stored_versions import Description, FetchedVersions, Link, parse_description
from tests.conftest import BUS_SIZES, MAX_MESSAGE_BYTES
from tests.harness.fakes import until
from tests.harness.weights import Engine, OtherRank, running


class Store(Objects):
    """Records reads. Objects in ``wrong`` return other bytes; objects in ``cut`` lose the bus after one chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.starts: list[int] = []
        self.wrong: set[str] = set()
        self.cut: set[str] = set()

    def read(self, name: str, *, start: int = 0) -> Iterator[bytes]:
        self.fetched.append(name)
        self.starts.append(start)
        for number, block in enumerate(super().read(name, start=start)):
            if name in self.cut and number == 1:
                raise BusError("the connection is closed")
            yield bytes(byte ^ 1 for byte in block) if name in self.wrong else block

    def took(self) -> list[str]:
        taken, self.fetched = self.fetched, []
        return taken


class Rig:
    """A learner that changes a few weights per version, and remote hosts."""

    def __init__(self, root: Path, model_path: Path) -> None:
        self.root, self.model_path = root, model_path
        self.store = Store()
        self.weight = torch.randn(400, 257, generator=torch.Generator().manual_seed(0)).bfloat16()
        self.learner = self.channel("learner")

    def channel(self, name: str, **options: Any) -> ObjectsChannel:
        return ObjectsChannel(
            self.root / name, keep=2, model_path=self.model_path, objects=self.store, **({"full_every": 4} | options)
        )

    def publish(self, version: int, *, incarnation: int = 0, learner: ObjectsChannel | None = None) -> WeightVersion:
        self.weight[version % 400, ::7] += 0.5
        snapshot = Snapshot.from_tensors(
            [("a", self.weight), ("b", torch.arange(5.0)), ("c", torch.zeros(3, dtype=torch.uint8))]
        )
        return (learner or self.learner).publish(snapshot, incarnation=incarnation, policy_version=version)

    def host(self, name: str = "far") -> FetchedVersions:
        return FetchedVersions(self.root / name, keep=2, model_path=self.model_path, objects=self.store)

    def check(self, folder: Path) -> None:
        assert safetensors.torch.load_file(folder / WEIGHTS_FILE)["a"].equal(self.weight)
        assert (folder / "config.json").exists()


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), characters="0123456789")


@pytest.fixture
def rig(tmp_path: Path, model_path: Path) -> Rig:
    return Rig(tmp_path, model_path)


def test_uses_delta_when_previous_version_is_cached(rig: Rig) -> None:
    host = rig.host()
    for version in range(1, 11):
        rig.check(host.folder(rig.publish(version)))
    assert rig.store.took() == ["0-1.full", *(f"0-{version}.delta" for version in range(2, 11))]
    assert rig.learner.published_bytes < rig.weight.numel() * 2 / 50


def in_two_files(rig: Rig, version: int) -> WeightVersion:
    """Publish a version of a learner of two ranks; the changed tensor is in the first rank's part."""
    rig.weight[version % 400, ::7] += 0.5
    other = OtherRank(Snapshot.from_tensors([("b", torch.arange(5.0)), ("c", torch.zeros(3, dtype=torch.uint8))]))
    exported = replace(Snapshot.from_tensors([("a", rig.weight)]), others=(other,))
    return rig.learner.publish(exported, incarnation=0, policy_version=version)


def test_version_of_several_ranks_is_stored_as_one_delta(rig: Rig) -> None:
    def check(folder: Path) -> None:
        read = safetensors.torch.load_file(folder / "model-00001-of-00002.safetensors")
        assert read["a"].equal(rig.weight)
        assert safetensors.torch.load_file(folder / "model-00002-of-00002.safetensors").keys() == {"b", "c"}
        assert (folder / "config.json").exists()

    host = rig.host()
    for version in range(1, 8):
        check(host.folder(in_two_files(rig, version)))
    first, later = ["0-1.full", "0-1.1.full", "0-1.2.full"], [f"0-{version}.delta" for version in range(2, 8)]
    assert rig.store.took() == [*first, *later]  # the third file is the index
    assert rig.learner.published_bytes < rig.weight.numel() * 2 / 50
    check(rig.host("late").folder(in_two_files(rig, 8)))
    assert rig.store.took() == ["0-5.full", "0-5.1.full", "0-5.2.full", "0-6.delta", "0-7.delta", "0-8.delta"]


def test_late_joiner_fetches_the_last_full_version_and_the_deltas_since(rig: Rig) -> None:
    for version in range(1, 8):
        weights = rig.publish(version)
    rig.check(rig.host().folder(weights))
    assert rig.store.took() == ["0-5.full", "0-6.delta", "0-7.delta"]


def test_worker_that_missed_versions_catches_up_by_deltas(rig: Rig) -> None:
    host = rig.host()
    host.folder(rig.publish(1))
    rig.store.took()
    for version in (2, 3, 4):
        weights = rig.publish(version)
    rig.check(host.folder(weights))
    assert rig.store.took() == ["0-2.delta", "0-3.delta", "0-4.delta"]


def test_a_new_incarnation_starts_with_a_full_version_and_removes_the_old_one(rig: Rig) -> None:
    rig.publish(1)
    rig.publish(2)
    weights = rig.publish(2, incarnation=1, learner=rig.channel("learner"))
    assert rig.store.names() == {"1-2.full"}
    rig.check(rig.host().folder(weights))


def test_large_change_is_stored_in_full(rig: Rig) -> None:
    learner = rig.channel("learner", delta_share=0.0001)
    rig.publish(1, learner=learner)
    weights = rig.publish(2, learner=learner)
    assert weights.uri == "0-2.full"
    assert "0-2.delta" not in rig.store.names()
    rig.check(rig.host().folder(weights))


def test_objects_of_kept_versions_stay_and_others_are_removed(rig: Rig) -> None:
    for version in range(1, 30):
        weights = rig.publish(version)
        assert len(rig.store.names()) <= 8
    rig.check(rig.host().folder(weights))


@pytest.mark.parametrize("name", ["0-3.delta", "0-2.delta"])
def test_routes_around_a_missing_delta(rig: Rig, name: str) -> None:
    host = rig.host()
    host.folder(rig.publish(1))
    for version in range(2, 6):  # version 5 is stored whole as well
        weights = rig.publish(version)
    rig.store.remove(name)
    rig.check(host.folder(weights))
    assert rig.store.took()[-1] == "0-5.full"


def test_routes_around_a_corrupt_delta(rig: Rig) -> None:
    host = rig.host()
    host.folder(rig.publish(1))
    for version in range(2, 6):
        weights = rig.publish(version)
    rig.store.wrong = {"0-4.delta"}
    rig.check(host.folder(weights))
    assert rig.store.took()[-1] == "0-5.full"


@pytest.mark.parametrize("size", [0, 1, 101, 100_000, -1])
def test_corrupt_base_is_fetched_again(rig: Rig, size: int) -> None:
    host = rig.host()
    file = host.folder(rig.publish(1)) / WEIGHTS_FILE
    data = file.read_bytes()
    file.write_bytes(data[:size] if size >= 0 else data[:-1] + b"\xff")
    rig.check(host.folder(rig.publish(2)))
    assert rig.store.took()[-2:] == ["0-1.full", "0-2.delta"]


def test_learner_without_its_previous_folder_stores_in_full(rig: Rig) -> None:
    rig.publish(1)
    shutil.rmtree(rig.root / "learner")
    assert rig.publish(2).uri == "0-2.full"


def test_corrupt_full_version_is_refused_and_never_visible(rig: Rig) -> None:
    weights = rig.publish(1)
    rig.store.wrong = {"0-1.full"}
    with pytest.raises(WeightsError, match="sha256 is .* was published"):
        rig.host().folder(weights)
    assert {path.name for path in (rig.root / "far").iterdir()} == {".lock"}
    rig.store.wrong = set()
    rig.check(rig.host().folder(weights))


def test_interrupted_fetch_is_never_visible_and_starts_again(rig: Rig) -> None:
    weights = rig.publish(1)
    rig.store.cut = {"0-1.full"}
    with pytest.raises(WeightsError, match="connection is closed"):
        rig.host().folder(weights)
    assert {path.name for path in (rig.root / "far").iterdir()} == {".lock"}
    rig.store.cut = set()
    rig.check(rig.host().folder(weights))


def test_workers_of_one_machine_fetch_once(rig: Rig) -> None:
    weights = rig.publish(1)

    async def fetch() -> list[Path]:
        return await asyncio.gather(*(asyncio.to_thread(rig.host().folder, weights) for _ in range(4)))

    assert len(set(asyncio.run(fetch()))) == 1
    assert rig.store.took() == ["0-1.full"]


def test_fetched_versions_beyond_keep_are_removed(rig: Rig) -> None:
    host = rig.host()
    for version in range(1, 6):
        host.folder(rig.publish(version))
    assert {path.name.rpartition("-")[0] for path in (rig.root / "far").iterdir()} == {"0-4", "0-5", ""}


async def test_an_engine_loads_the_folder_that_its_worker_fetched(rig: Rig) -> None:
    class Reading(Engine):
        async def load(self, weights: WeightVersion) -> LoadReport:
            rig.check(Path(weights.uri))
            return await super().load(weights)

    bus = MemoryBus(**BUS_SIZES, max_message_bytes=MAX_MESSAGE_BYTES)
    engine, host = Reading(receives=False), rig.channel("far")
    follower = WeightFollower("w0", bus, engine=engine, channel=host, load="in_flight")
    async with running(follower):
        for version in (1, 2):
            await bus.put(WEIGHTS, rig.publish(version))
            await until(lambda version=version: engine.version == (0, version))
    assert rig.store.took() == ["0-1.full", "0-2.delta"]


def test_description_of_other_weights_and_invalid_checksum_are_refused(rig: Rig) -> None:
    weights = rig.publish(1)
    for sha256, words in (("0" * 64, "others are stored"), ("../../x", "is not a sha256")):
        with pytest.raises(WeightsError, match=words):
            rig.host().folder(replace(weights, sha256=sha256))


def link(version: int, *, full: int = 0, delta: int = 1) -> Link:
    return Link(incarnation=0, policy_version=version, sha256=f"{version:064x}", full=full, delta=delta)


def stored(count: int, *, every: int) -> list[Description]:
    """The descriptions of versions 0 to ``count`` - 1."""
    made, newest = [], Description(files=(("model.safetensors", 100),), links=())
    for version in range(count):
        full = 100 if newest.is_full_due(every=every) else 0
        newest = newest.grown(link(version, full=full, delta=1 if version else 0))
        made.append(newest)
    return made


def test_every_version_can_be_made_from_one_full_version_of_its_chain() -> None:
    for version, description in enumerate(stored(100, every=8)):
        assert description.newest.policy_version == version
        full = [number for number, one in enumerate(description.links) if one.full]
        assert len(full) == 1
        assert all(one.delta for one in description.links[full[0] + 1 :])
        assert [one.policy_version for one in description.links if one.full] == [version - version % 8]


def test_chain_begins_with_the_version_before_its_full_one() -> None:
    """A worker that has it fetches one more delta instead of the full version."""
    description = stored(10, every=8)[-1]
    assert [one.policy_version for one in description.links] == [7, 8, 9]
    assert description.objects == {"0-8.full", "0-8.delta", "0-9.delta"}


def test_version_without_a_delta_begins_a_new_chain() -> None:
    before = stored(3, every=8)[-1]
    assert before.grown(link(3, full=100, delta=0)).objects == {"0-3.full"}


@pytest.mark.parametrize(("every", "full"), [(1, [0, 1, 2, 3, 4, 5, 6]), (3, [0, 3, 6]), (16, [0])])
def test_full_version_is_due_at_first_and_every_so_many(every: int, full: list[int]) -> None:
    assert [number for number, one in enumerate(stored(7, every=every)) if one.newest.full] == full


def test_description_reads_back_and_a_broken_one_is_refused() -> None:
    description = stored(10, every=8)[-1]
    text = description.text
    assert parse_description(text) == description
    for broken in ("", "{", "[1]", '{"files":[["a",1]],"links":[{"x":0}]}', text.replace("model.s", "../model.s")):
        with pytest.raises(WeightsError, match="cannot parse the description"):
            parse_description(broken)
