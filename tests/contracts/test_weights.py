"""The contract of every WeightChannel (asyncrl/weights/port.py), over files and over both object stores."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers

from asyncrl.bus.memory.bus import MemoryBus
from asyncrl.bus.memory.stores import Objects
from asyncrl.config import WeightsSection
from asyncrl.errors import BackendError, WeightsError
from asyncrl.messages import replace
from asyncrl.tensors import quantized_model
from asyncrl.tensors.model_tensors import read_shapes
from asyncrl.tensors.snapshot import Snapshot
from asyncrl.weights import files
from asyncrl.weights.files import FilesChannel
from asyncrl.weights.objects_channel import ObjectsChannel
from asyncrl.weights.port import WeightChannel
from tests.conftest import BUS_SIZES
from tests.harness import contract_adapters
from tests.harness.weights import in_parts, object_store, tensors, visible


@pytest.fixture(params=["files", "memory", "jetstream", *contract_adapters.extra("channel")])
def channel(request: pytest.FixtureRequest, tmp_path: Path, model_path: Path) -> Iterator[WeightChannel]:
    directory = tmp_path / "weights"
    if request.param == "files":
        yield FilesChannel(directory, keep=2, model_path=model_path)
    elif contract_adapters.is_extra(request.param):
        section = WeightsSection(channel=request.param, keep=2)
        run = contract_adapters.run_of(model=model_path, directory=tmp_path, weights=section)
        yield contract_adapters.load(request.param).build(run, bus=MemoryBus(**BUS_SIZES, max_message_bytes=2**20))
    elif request.param == "memory":
        yield ObjectsChannel(directory, keep=2, model_path=model_path, objects=Objects())
    else:
        with closing(object_store(request.getfixturevalue("nats_server"))) as objects:
            yield ObjectsChannel(directory, keep=2, model_path=model_path, objects=objects)


def test_version_reads_back_bit_equal(channel: WeightChannel) -> None:
    generator = torch.Generator().manual_seed(0)
    published = {
        "odd.bf16": torch.randn(3, 5, generator=generator).bfloat16(),
        "f32": torch.randn(7, generator=generator),
        "transposed": torch.randn(4, 6, generator=generator).t(),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "special": torch.tensor([float("nan"), float("inf"), -0.0]),
    }
    weights = channel.publish(Snapshot.from_tensors(published.items()), incarnation=0, policy_version=1)
    read = safetensors.torch.load_file(channel.verify(weights) / "model.safetensors")
    assert read.keys() == published.keys()
    for name, tensor in published.items():
        assert read[name].dtype == tensor.dtype and read[name].shape == tensor.shape
        assert read[name].reshape(-1).view(torch.uint8).equal(tensor.contiguous().reshape(-1).view(torch.uint8)), name


def test_a_version_loads_as_a_hugging_face_model(channel: WeightChannel, model_path: Path) -> None:
    assert_loads_as_published(channel, model_path, ranks=1)


def test_a_version_of_several_ranks_loads_as_a_hugging_face_model(channel: WeightChannel, model_path: Path) -> None:
    assert_loads_as_published(channel, model_path, ranks=3)


def assert_loads_as_published(channel: WeightChannel, model_path: Path, *, ranks: int) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path)
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    for version in (1, 2):  # the second version takes config and tokenizer from the first
        exported = in_parts(model.state_dict().items(), ranks)
        weights = channel.publish(exported, incarnation=0, policy_version=version)
    folder = channel.verify(weights)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.lm_head.weight.equal(model.lm_head.weight)
    assert loaded.generation_config.eos_token_id == 1
    assert transformers.AutoTokenizer.from_pretrained(folder).encode("12") == [5, 6]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_large_part_is_several_files_which_load_as_a_hugging_face_model(
    channel: WeightChannel, model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    monkeypatch.setattr(files, "_FILE_BYTES", 12_000)
    assert_loads_as_published(channel, model_path, ranks=ranks)
    names = {path.name for path in (tmp_path / "weights" / "0-2").glob("*.safetensors")}
    first = "model-00001-of-00002-1.safetensors" if ranks == 2 else f"model-00001-of-{len(names):05}.safetensors"
    assert not names or (len(names) > ranks and first in names)


@pytest.mark.parametrize("quantization", ["fp8", "fp8_ue8m0", "int4"])
def test_quantized_versions_say_their_format(tmp_path: Path, model_path: Path, quantization: str) -> None:
    channel = FilesChannel(tmp_path / "weights", keep=2, model_path=model_path, quantization=quantization)
    given = {"model.norm.weight": torch.ones(8), "model.layers.0.mlp.experts.0.up_proj.weight": torch.ones(128, 128)}
    for version in (1, 2):  # the second version takes its config from the first
        exported = Snapshot.from_tensors(quantized_model.quantize_tensors(given.items(), quantization))
        weights = channel.publish(exported, incarnation=0, policy_version=version)
        folder = channel.verify(weights)
        config = json.loads((folder / "config.json").read_text())
        assert config["quantization_config"] == quantized_model.config(quantization)
        assert set(read_shapes(folder)) == {entry.name for entry in exported.entries}


def test_a_version_says_its_own_dtype(tmp_path: Path, model_path: Path) -> None:
    """Hugging Face loads a folder in the dtype that it says, and the model that was trained may have another one."""
    channel = FilesChannel(tmp_path / "weights", keep=2, model_path=model_path)
    for version, dtype in enumerate((torch.bfloat16, torch.float32)):
        exported = Snapshot.from_tensors([("model.norm.weight", torch.ones(8, dtype=dtype))])
        folder = channel.verify(channel.publish(exported, incarnation=0, policy_version=version))
        assert transformers.AutoConfig.from_pretrained(folder).dtype == dtype


def test_version_describes_what_was_published(files_channel: FilesChannel) -> None:
    weights = files_channel.publish(tensors(), incarnation=3, policy_version=7)
    assert weights.version == (3, 7)
    file = Path(weights.uri) / "model.safetensors"
    assert Path(weights.uri).is_absolute()
    assert file.stat().st_size == weights.num_bytes
    # Another process with the same directory verifies the version.
    other = FilesChannel(file.parent.parent, keep=2, model_path=file.parent)
    assert other.verify(weights) == Path(weights.uri)


def test_a_torn_write_is_never_visible(files_channel: FilesChannel, monkeypatch: pytest.MonkeyPatch) -> None:
    first = files_channel.publish(tensors(), incarnation=0, policy_version=0)

    def killed(self: Path, target: Path) -> Path:
        raise KeyboardInterrupt  # between the last byte and the rename

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(files.Path, "rename", killed)
        files_channel.publish(tensors(), incarnation=0, policy_version=1)
    assert visible(files_channel) == {"0-0"}
    assert files_channel.verify(first)
    files_channel.publish(tensors(), incarnation=0, policy_version=2)  # the next publish removes the leftovers
    assert {path.name for path in files_channel._directory.iterdir()} == {"0-0", "0-2"}


def test_version_with_a_missing_part_is_not_published(channel: WeightChannel) -> None:
    """A rank dies: the version is neither announced nor found, and the previous one stays."""
    given = [("b", torch.zeros(3)), ("a", torch.ones(2))]
    first = channel.publish(in_parts(given), incarnation=0, policy_version=1)
    with pytest.raises(BackendError, match="rank 1 is gone"):
        channel.publish(in_parts(given, dies=True), incarnation=0, policy_version=2)
    with pytest.raises(WeightsError, match="not found"):
        channel.verify(replace(first, policy_version=2, uri=first.uri.replace("0-1", "0-2")))
    channel.verify(first)
    again = channel.publish(in_parts(given), incarnation=1, policy_version=1)
    assert again.sha256 == first.sha256
    folder = channel.verify(again)
    assert sorted(path.name for path in folder.glob("*safetensors*")) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]


def test_adapters_of_several_ranks_are_one_file(files_channel: FilesChannel) -> None:
    """Adapters are small, and their readers look for one file of that name."""
    layer = "base_model.model.model.layers.0.self_attn"
    names = [f"{layer}.{name}_proj.lora_{side}.weight" for name in "qv" for side in "AB"]
    exported = in_parts((name, torch.ones(2, 4)) for name in names)
    weights = files_channel.publish(exported, incarnation=0, policy_version=1)
    folder = files_channel.verify(weights)
    assert {path.name for path in folder.glob("*.safetensors*")} == {"adapter_model.safetensors"}
    assert safetensors.torch.load_file(folder / "adapter_model.safetensors").keys() == set(names)
    assert (folder / "adapter_config.json").exists()


def test_part_with_another_checksum_is_refused(files_channel: FilesChannel) -> None:
    weights = files_channel.publish(
        in_parts([("b", torch.zeros(3)), ("a", torch.ones(2))]), incarnation=0, policy_version=1
    )
    part = Path(weights.uri) / "model-00002-of-00002.safetensors"
    data = part.read_bytes()
    part.write_bytes(data[:-1] + b"x")
    with pytest.raises(WeightsError, match=r"00002\.safetensors: sha256"):
        files_channel.verify(weights)
    part.write_bytes(data)
    assert files_channel.verify(weights)
    index = Path(weights.uri) / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("00002-of", "00001-of"))
    with pytest.raises(WeightsError, match=r"index\.json: sha256"):
        files_channel.verify(weights)


def test_resumed_run_may_publish_a_lower_version(channel: WeightChannel) -> None:
    channel.publish(tensors(1.0), incarnation=0, policy_version=9)
    weights = channel.publish(tensors(2.0), incarnation=1, policy_version=5)
    read = safetensors.torch.load_file(channel.verify(weights) / "model.safetensors")
    assert read["b"].tolist() == [2.0, 2.0, 2.0]


def test_a_retained_version_stays_until_it_is_released(channel: WeightChannel) -> None:
    kept = channel.publish(tensors(1.0), incarnation=0, policy_version=1)
    channel.retain(kept)
    for version in range(2, 9):
        channel.publish(tensors(float(version)), incarnation=0, policy_version=version)
    read = safetensors.torch.load_file(channel.verify(kept) / "model.safetensors")
    assert read["b"].tolist() == [1.0, 1.0, 1.0]
    channel.release(kept)
    channel.release(kept)  # releasing a version that is not retained does nothing


def test_released_version_is_removed_by_the_next_publish(files_channel: FilesChannel) -> None:
    kept = files_channel.publish(tensors(1.0), incarnation=0, policy_version=1)
    files_channel.retain(kept)
    for version in (2, 3, 4):
        files_channel.publish(tensors(), incarnation=0, policy_version=version)
    assert visible(files_channel) == {"0-1", "0-3", "0-4"}
    files_channel.release(kept)
    files_channel.publish(tensors(), incarnation=0, policy_version=5)
    assert visible(files_channel) == {"0-4", "0-5"}


def test_progress_rises_while_publishing(channel: WeightChannel) -> None:
    channel.publish(tensors(1.0), incarnation=0, policy_version=1)
    first = channel.progress
    channel.publish(tensors(2.0), incarnation=0, policy_version=2)
    assert channel.progress > first > 0
    assert channel.published_bytes > 0


def test_a_wrong_byte_is_refused(files_channel: FilesChannel) -> None:
    weights = files_channel.publish(tensors(), incarnation=0, policy_version=0)
    with (Path(weights.uri) / "model.safetensors").open("r+b") as stream:
        stream.seek(-1, 2)
        stream.write(b"\xff")
    with pytest.raises(WeightsError, match="sha256"):
        files_channel.verify(weights)


def test_a_truncated_file_is_refused(files_channel: FilesChannel) -> None:
    weights = files_channel.publish(tensors(), incarnation=0, policy_version=0)
    with (Path(weights.uri) / "model.safetensors").open("r+b") as stream:
        stream.truncate(weights.num_bytes - 1)
    with pytest.raises(WeightsError, match=f"{weights.num_bytes - 1} bytes, but {weights.num_bytes} were published"):
        files_channel.verify(weights)


def test_a_wrong_checksum_is_refused(channel: WeightChannel) -> None:
    weights = channel.publish(tensors(), incarnation=0, policy_version=0)
    with pytest.raises(WeightsError, match="000000000000"):
        channel.verify(replace(weights, sha256="0" * 64))


def test_a_missing_version_is_refused(channel: WeightChannel) -> None:
    weights = channel.publish(tensors(), incarnation=0, policy_version=0)
    with pytest.raises(WeightsError, match="not found"):
        channel.verify(replace(weights, uri=weights.uri + "9"))


def test_versions_beyond_keep_are_collected_and_the_newest_never(files_channel: FilesChannel) -> None:
    published = [files_channel.publish(tensors(), incarnation=0, policy_version=version) for version in range(5)]
    assert visible(files_channel) == {"0-3", "0-4"}
    with pytest.raises(WeightsError, match="not found"):
        files_channel.verify(published[2])
    # Ten comes after nine, because versions are numbers, not text. A skipped version is normal.
    files_channel.publish(tensors(), incarnation=0, policy_version=9)
    files_channel.publish(tensors(), incarnation=0, policy_version=10)
    assert visible(files_channel) == {"0-9", "0-10"}


def test_resumed_run_supersedes_higher_versions_of_the_previous_incarnation(files_channel: FilesChannel) -> None:
    files_channel.publish(tensors(), incarnation=0, policy_version=8)
    files_channel.publish(tensors(), incarnation=0, policy_version=9)
    rolled_back = files_channel.publish(tensors(), incarnation=1, policy_version=5)
    assert visible(files_channel) == {"0-9", "1-5"}
    assert files_channel.verify(rolled_back)


def test_leftovers_of_another_run_do_not_displace_the_newest(files_channel: FilesChannel, model_path: Path) -> None:
    files_channel.publish(tensors(), incarnation=2, policy_version=50)
    fresh = FilesChannel(files_channel._directory, keep=2, model_path=model_path)
    weights = fresh.publish(tensors(), incarnation=0, policy_version=0)
    assert visible(fresh) == {"0-0"}
    assert fresh.verify(weights)


def test_publishing_a_version_again_replaces_it(channel: WeightChannel) -> None:
    channel.publish(tensors(1.0), incarnation=0, policy_version=1)
    weights = channel.publish(tensors(2.0), incarnation=0, policy_version=1)
    read = safetensors.torch.load_file(channel.verify(weights) / "model.safetensors")
    assert read["b"].tolist() == [2.0, 2.0, 2.0]
