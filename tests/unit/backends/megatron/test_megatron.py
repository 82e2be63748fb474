"""Parts of the Megatron backend: its CPU shim, weight map, logprobs over a split vocabulary, and the cost of a step."""

from __future__ import annotations

import gc
import json
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from asyncrl.backends import flops, huggingface, micro_batches, weight_cuts
from asyncrl.backends.kernels import fused, token_logprobs
from asyncrl.backends.megatron import cpu_shim, stored_moments
from asyncrl.backends.megatron import model as megatron_model
from asyncrl.backends.megatron.refusals import require_tensors_of_engines
from asyncrl.backends.weight_map import weight_map
from asyncrl.errors import ConfigError
from tests.harness.backends import (
    LEARNING_RATE,
    RANKS,
    distance,
    expected_logprobs,
    forward,
    hugging_face,
    sequences,
    shares,
    started,
    tiny_model,
    weights,
)
from tests.harness.packing import pack


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


# -- the model folder --------------------------------------------------------------------------------------------------


def edited(folder: Path, copy: Path, **changes: Any) -> Path:
    """Copy the model in ``folder`` to ``copy`` and change entries of its config.json."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    return copy


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}, ["GPT2LMHeadModel", "Qwen3ForCausalLM"]),
        ({"attention_bias": True}, ["attention_bias"]),
        ({"hidden_act": "gelu"}, ["gelu"]),
        ({"quantization_config": {"quant_method": "fp8"}}, ["quantization_config", "fp8"]),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, ["dynamic", "llama3"]),
    ],
    ids=["architecture", "bias", "activation", "quantized", "rope"],
)
def test_untrainable_model_is_a_config_error(
    folder: Path, tmp_path: Path, changes: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        huggingface.read_shape(edited(folder, tmp_path, **changes))
    for word in [str(tmp_path), *words]:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_tensor_too_many_or_too_few_is_one_line_before_the_start(folder: Path, tmp_path: Path) -> None:
    """Engines expect exactly the tensors of the folder with every version."""
    model = edited(folder, tmp_path)
    shape = huggingface.read_shape(model)
    tensors = load_file(folder / "model.safetensors")
    gate = {"model.layers.0.self_attn.gate.weight": torch.zeros(2)}
    save_file(tensors | gate, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError) as caught:
        require_tensors_of_engines(model, shape)
    assert str(caught.value) == (
        f"model.path: {model}: its weights have model.layers.0.self_attn.gate.weight, which the learner does not train "
        "and engines expect with every version; remove what the model does not use from its files, or describe it in "
        "a file of yours with model.family"
    )
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="its weights lack model.norm.weight, which its config.json needs; take both"):
        require_tensors_of_engines(model, shape)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ],
    ids=["linear", "llama3"],
)
def test_scaled_rotary_positions_are_those_of_transformers(folder: Path, tmp_path: Path, rope: dict[str, Any]) -> None:
    model = edited(folder, tmp_path, rope_parameters=rope | {"rope_theta": 1000.0})
    (packed,) = pack(sequences(lengths=(60,)), max_tokens=100)
    with started("megatron-1", model) as backend:
        logprobs = forward(backend, "megatron-1", packed)
    np.testing.assert_allclose(logprobs, expected_logprobs(hugging_face(model), packed.tokens), atol=1e-4)
    assert np.abs(logprobs - expected_logprobs(hugging_face(folder), packed.tokens)).max() > 1e-2


def test_weights_in_several_files_are_found_by_their_index(folder: Path, tmp_path: Path) -> None:
    transformers.AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    with started("megatron-1", tmp_path) as backend:
        assert distance(weights(backend), load_file(folder / "model.safetensors")) == 0.0


@pytest.mark.parametrize("tensor_parallel", [1, 2])
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama"])
def test_weights_survive_being_cut_into_shards(tmp_path: Path, architecture: str, tensor_parallel: int) -> None:
    tiny_model(tmp_path, architecture=architecture)
    shape = huggingface.read_shape(tmp_path)
    original = load_file(tmp_path / "model.safetensors")
    seen = set()
    for entry in weight_map(shape):
        parts = [original[name] for name in entry.huggingface]
        shards = weight_cuts.fuse(parts, entry.cut, shape, tensor_parallel=tensor_parallel)
        assert len(shards) == tensor_parallel
        assert len({shard.shape for shard in shards}) == 1
        for name, tensor in zip(entry.huggingface, weight_cuts.unfuse(shards, entry.cut, shape), strict=True):
            assert torch.equal(tensor, original[name])
            seen.add(name)
    assert seen == set(original)


def test_a_vocabulary_that_does_not_divide_is_padded_and_cut_back(tmp_path: Path) -> None:
    """50 tokens over 4 ranks: 52 rows, 13 each."""
    shape = huggingface.read_shape(tiny_model(tmp_path))
    rows = torch.randn(50, 3)
    shards = weight_cuts.fuse([rows], "vocabulary", shape, tensor_parallel=4)
    assert [shard.shape[0] for shard in shards] == [13] * 4
    assert torch.equal(weight_cuts.unfuse(shards, "vocabulary", shape)[0], rows)


# -- logprobs ----------------------------------------------------------------------------------------------------------


class FakeGroup:
    """Tensor-parallel ranks, played by threads of this process."""

    def __init__(self, rank: int, slots: list[Any], barrier: threading.Barrier) -> None:
        self._rank, self._slots, self._barrier = rank, slots, barrier

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return len(self._slots)

    def reduce(self, values: torch.Tensor, operation: Any) -> torch.Tensor:
        self._slots[self._rank] = values
        self._barrier.wait(120)
        stacked = torch.stack(list(self._slots))
        self._barrier.wait(120)
        return stacked.amax(0) if operation == torch.distributed.ReduceOp.MAX else stacked.sum(0)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("chunk", [2**26, 30], ids=["whole", "chunked"])
def test_logprobs_and_entropy_over_a_split_vocabulary(monkeypatch: pytest.MonkeyPatch, ranks: int, chunk: int) -> None:
    """19 tokens in 20 columns: the last column is padding, and must have no probability despite its large logit."""
    monkeypatch.setattr(token_logprobs, "_CHUNK_NUMBERS", {"cpu": chunk})
    monkeypatch.setattr(token_logprobs, "_reduce", lambda v, op, group: group.reduce(v, op))
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, 9, generator=generator)
    weight = torch.randn(20, 9, generator=generator)
    targets = torch.tensor([0, 3, 9, 10, 11, 18, 5])
    scales = torch.linspace(0.5, 2.0, 7)
    exact = hidden.clone().requires_grad_(), weight[:19].clone().requires_grad_()
    distribution = torch.log_softmax(exact[0] @ exact[1].T / 0.7, -1)
    expected = distribution.gather(-1, targets[:, None])[:, 0]
    expected_entropy = -(distribution.exp() * distribution).sum(-1)
    (expected * scales + expected_entropy).sum().backward()

    slots: list[Any] = [None] * ranks
    barrier = threading.Barrier(ranks)
    results: list[Any] = [None] * ranks

    def one_rank(rank: int) -> None:
        own = hidden.clone().requires_grad_(), weight.chunk(ranks)[rank].clone().requires_grad_()
        group: Any = FakeGroup(rank, slots, barrier) if ranks > 1 else None
        logprobs, entropy = token_logprobs.linear_logprobs(
            *own, targets, temperature=0.7, vocabulary_size=19, group=group
        )
        (logprobs * scales + entropy).sum().backward()
        results[rank] = (logprobs.detach(), entropy.detach(), own[0].grad, own[1].grad)

    threads = [threading.Thread(target=one_rank, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    of_weight = torch.cat([result[3] for result in results])
    for logprobs, entropy, of_hidden, _ in results:
        torch.testing.assert_close(logprobs, expected.detach(), atol=1e-5, rtol=0)
        torch.testing.assert_close(entropy, expected_entropy.detach(), atol=1e-5, rtol=0)
        torch.testing.assert_close(of_hidden, exact[0].grad, atol=1e-5, rtol=0)
    torch.testing.assert_close(of_weight[:19], exact[1].grad, atol=1e-5, rtol=0)
    assert not of_weight[19].any()


def test_logits_that_are_kept_give_the_same_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve rows of twenty columns, in chunks of three rows; the logits of the first two chunks are kept."""
    monkeypatch.setattr(token_logprobs, "_CHUNK_NUMBERS", {"cpu": 60})
    monkeypatch.setattr(token_logprobs, "_KEPT_NUMBERS", {"cpu": 120})
    random, results = torch.Generator().manual_seed(0), []
    hidden, weight = torch.randn(12, 8, generator=random), torch.randn(20, 8, generator=random)
    for keeps_logits in (False, True):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        logprobs, entropy = token_logprobs.linear_logprobs(
            *leaves, torch.arange(12), temperature=0.7, vocabulary_size=20, keeps_logits=keeps_logits
        )
        assert len(logprobs.grad_fn.kept) == (2 if keeps_logits else 0)  # type: ignore[union-attr]
        results.append([logprobs, entropy, *torch.autograd.grad((logprobs + entropy).sum(), leaves)])
    for again, kept in zip(*results, strict=True):
        assert torch.equal(again, kept)


def test_a_frozen_output_layer_gets_no_gradient_and_costs_no_product(monkeypatch: pytest.MonkeyPatch) -> None:
    random, of_hidden = torch.Generator().manual_seed(0), []
    hidden, weight = torch.randn(12, 8, generator=random), torch.randn(20, 8, generator=random)
    for is_trained in (True, False):
        if not is_trained:
            monkeypatch.setattr(token_logprobs, "_add_product", None)  # an error if it were called
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_(is_trained)
        logprobs, entropy = token_logprobs.linear_logprobs(
            *leaves, torch.arange(12), temperature=0.7, vocabulary_size=20
        )
        (logprobs + entropy).sum().backward()
        assert (leaves[1].grad is not None) == is_trained
        of_hidden.append(leaves[0].grad)
    assert torch.equal(of_hidden[0], of_hidden[1])


def test_rectangles_hold_sequences_of_similar_length_and_lose_no_token() -> None:
    """Lengths 3, 8, 1, 7, 4 make rectangles of 8 and 7; 4 and 3; 1. The sequence of 7 is padded with its last token."""
    boundaries = np.array([0, 3, 11, 12, 19, 23], np.int32)
    indices, order = micro_batches.rectangles(boundaries)
    assert [part.shape for part in indices] == [(2, 8), (2, 4), (1, 1)]
    flat = np.concatenate([part.ravel() for part in indices])
    assert flat[order].tolist() == list(range(23))
    assert indices[0][1].tolist() == [12, 13, 14, 15, 16, 17, 18, 18]


# -- the shim ----------------------------------------------------------------------------------------------------------


def test_cpu_shim_does_not_change_torch(folder: Path) -> None:
    """torch's device contexts know factories by identity; if one is wrapped, transformers loads garbage."""
    before = {name: getattr(torch, name) for name in ("zeros", "empty", "tensor", "compile")}
    before_cuda = {name: getattr(torch.cuda, name) for name in ("current_device", "Stream", "get_rng_state")}
    type_name = torch.Tensor.type
    with started("megatron-1", folder) as backend:
        backend.step(shares("megatron-1", sequences()), learning_rate=LEARNING_RATE)
    assert before == {name: getattr(torch, name) for name in before}
    assert before_cuda == {name: getattr(torch.cuda, name) for name in before_cuda}
    assert torch.Tensor.type is type_name
    assert all(value.__module__.startswith("torch") for value in [*before_cuda.values(), before["compile"]])
    with torch.device("meta"):
        assert torch.empty(1).is_meta


def test_cpu_shim_gives_megatron_the_cpu() -> None:
    cpu_shim.use_device(torch.device("cuda"))
    assert sys.modules["megatron.core.optimizer.clip_grads"].torch is torch
    cpu_shim.use_device(torch.device("cpu"))
    theirs = sys.modules["megatron.core.optimizer.clip_grads"].torch
    assert theirs.zeros(2, device="cuda").device.type == "cpu"
    assert theirs.cuda.current_device() == torch.device("cpu")
    assert theirs.Tensor is torch.Tensor
    assert megatron_model.GPTModel.__module__.startswith("megatron.core")


def test_recomputation_changes_memory_and_not_numbers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def counted(name: str) -> Any:
        function = getattr(fused, name)
        return lambda *a: (calls.append(name), function(*a))[1]

    for name in ("heads", "rms_norm", "swiglu"):
        monkeypatch.setattr(fused, name, counted(name))
    results = {}
    for recompute in ("none", "selective", "full"):
        calls.clear()
        with started("megatron-1", folder, options={"recompute": recompute}) as backend:
            backend.step(shares("megatron-1", sequences(), max_tokens=1000), learning_rate=LEARNING_RATE)
            results[recompute] = ([calls.count(name) for name in ("heads", "rms_norm", "swiglu")], weights(backend))
    # Two layers, each with attention, two norms and a gate, and a last norm. The backward pass repeats calls as the
    # option requires.
    assert [results[name][0] for name in results] == [[2, 5, 2], [2, 9, 4], [4, 9, 4]]
    assert distance(results["none"][1], results["selective"][1]) == 0.0
    assert distance(results["none"][1], results["full"][1]) == 0.0


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe", "qwen3_next", "deepseek_v3"])
def test_a_closed_backend_leaves_nothing_behind(architecture: str, recompute: str, tmp_path: Path) -> None:
    """A model that stays alive holds its process groups: fifty threads and seventy sockets."""
    folder = tiny_model(tmp_path, architecture=architecture)
    before = living_models()  # ignore models that other tests have left
    with started("megatron-1", folder, options={"recompute": recompute}) as backend:
        backend.step(shares("megatron-1", sequences()), learning_rate=LEARNING_RATE)
        assert living_models() - before
    gc.collect()
    assert not living_models() - before


def living_models() -> set[int]:
    return {id(thing) for thing in gc.get_objects() if type(thing) is megatron_model.PackedGPT}


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("megatron-1", "float32"),
        ("megatron-1", "bfloat16"),
        pytest.param(
            "megatron-ep2-dp2", "bfloat16", marks=RANKS
        ),  # a distributed optimizer for weights, one for experts
    ],
)
def test_offloaded_moments_do_not_change_training(
    kind: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_moments, "PIECE_NUMBERS", 10_000)
    folder = tiny_model(tmp_path / "model", architecture="qwen3_moe")
    results = []
    for offload in (False, True):
        arguments: Any = {"options": {"offload_optimizer": offload}, "dtype": dtype}
        with started(kind, folder, **arguments) as backend:
            for number in range(2):
                backend.step(shares(kind, sequences(number)), learning_rate=LEARNING_RATE)
            backend.save(tmp_path / f"saved-{offload}")
        with started(kind, folder, **arguments) as backend:
            backend.restore(tmp_path / f"saved-{offload}")
            backend.step(shares(kind, sequences(2)), learning_rate=LEARNING_RATE)
            results.append(weights(backend))
    assert distance(*results) == 0.0


@pytest.mark.parametrize("kind", ["megatron-1", pytest.param("megatron-2", marks=RANKS)])
def test_gradients_in_bfloat16_are_added_up_in_it_and_nearly_the_same(kind: str, tmp_path: Path) -> None:
    folder, norms, stored = tiny_model(tmp_path / "model", architecture="qwen3_moe"), [], []
    for dtype in ("float32", "bfloat16"):
        with started(kind, folder, dtype="bfloat16", options={"gradients_dtype": dtype}) as backend:
            norms.append(backend.step(shares(kind, sequences()), learning_rate=LEARNING_RATE).metrics["grad_norm"])
            policy: Any = backend
            (wrapper,) = policy._rank._trained["policy"]._buffers
            stored.append({buffer.grad_data.dtype for buffer in (*wrapper.buffers, *wrapper.expert_parallel_buffers)})
    assert stored == [{torch.float32}, {torch.bfloat16}]
    assert norms[0] != norms[1]
    assert norms[1] == pytest.approx(norms[0], rel=0.01)


def test_an_update_has_the_moments_of_two_pieces_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six weights of 10, 10, 30, 5, 5 and 10 numbers in pieces of up to 20: 10 + 10, 30, 5 + 5 + 10."""
    monkeypatch.setattr(stored_moments, "PIECE_NUMBERS", 20)
    weights = [torch.nn.Parameter(torch.arange(float(size))) for size in (10, 10, 30, 5, 5, 10)]
    twins = [torch.nn.Parameter(weight.detach().clone()) for weight in weights]
    plain, adamw = torch.optim.AdamW(twins, lr=0.1), torch.optim.AdamW(weights, lr=0.1)
    made: list[weakref.ref[torch.Tensor]] = []
    sizes, alive = [], []

    def look(*_: Any) -> None:
        """After the step of a piece: its moments are on the device, and perhaps those of the piece before."""
        homes = {home.data_ptr() for home in moments._homes.values()}
        own = [state[kind] for state in adamw.state.values() for kind in ("exp_avg", "exp_avg_sq")]
        own = [moment for moment in own if moment.data_ptr() not in homes]
        made.extend(map(weakref.ref, own))
        sizes.append(sum(moment.numel() for moment in own) // 2)
        alive.append(sum(one.numel() for made_ in made if (one := made_()) is not None) // 2)

    adamw.register_step_post_hook(look)
    moments = stored_moments.StoredMoments(adamw, torch.device("cpu"))
    for step in range(3):
        for weight, twin in zip(weights, twins, strict=True):
            weight.grad = twin.grad = torch.full_like(weight, step + 1.0)
        plain.step()
        with moments.updated():
            assert not adamw.param_groups[0]["params"]
        assert adamw.param_groups[0]["params"] == weights
        for weight, twin in zip(weights, twins, strict=True):
            assert torch.equal(weight, twin)
            assert torch.equal(adamw.state[weight]["exp_avg_sq"], plain.state[twin]["exp_avg_sq"])
    assert sizes == [20, 30, 20] * 3
    assert alive == [20, 50, 50] * 3
    assert not [one for ref in made if (one := ref()) is not None]


def test_flops_of_a_step_are_counted_by_hand(folder: Path) -> None:
    """Per token and layer: q 64 x 64, k and v 64 x 32, o 64 x 64, three matrices of 64 x 128; then the head 64 x 50.
    Per sequence of 10 tokens: 2 products of 10 x 10 scores x 64 wide, half masked, in 3 passes: 6 x 100 x 64."""
    shape = huggingface.read_shape(folder)
    sizes = (shape.hidden_size, shape.num_heads * shape.head_size, shape.num_key_value_heads * shape.head_size)
    assert (*sizes, shape.feed_forward_size, shape.num_layers) == (64, 64, 32, 128, 2)
    per_token = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128) + 64 * shape.vocabulary_size
    assert flops.matrix_parameters(shape) == per_token
    assert flops.training_flops(shape, [10, 10]) == 6 * per_token * 20 + 2 * (2 * 6 * 100 * 64)
    assert flops.training_flops(shape, [10, 10], has_adapters=True) == 4 * per_token * 20 + 2 * (2 * 6 * 100 * 64)


def test_the_peak_of_a_device_is_known_by_its_name() -> None:
    assert flops.peak_flops("NVIDIA H200") == 989e12
    assert flops.peak_flops("NVIDIA GeForce GT 710") is None
