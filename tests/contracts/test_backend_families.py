"""The contract of both backends for every model family: the logprobs, gradients and weights equal those of
transformers."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from asyncrl.backends import huggingface
from asyncrl.backends.kernels import fused
from asyncrl.backends.megatron import refusals
from asyncrl.config.layout import Layout
from asyncrl.errors import ConfigError
from asyncrl.policies.batching.packing import TrainingSequence, empty, sequence_slices
from asyncrl.tensors.transformers_models import by_names_in_files
from tests.harness.backends import (
    LEARNING_RATE,
    RANKS,
    SETTINGS,
    distance,
    expected_logprobs,
    forward,
    hugging_face,
    num_shares,
    sequences,
    shares,
    started,
    tiny_model,
    weights,
)
from tests.harness.packing import pack

MIXTURES = (
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_5_moe",
    "glm4_moe",
    "deepseek_v3",
    "minimax_m2",
    "gpt_oss",
)
ARCHITECTURES = ("qwen2", "qwen3", "llama", "mistral", "glm4", "gemma3", "qwen3_5", *MIXTURES)
KINDS = ("reference", "megatron-1")


@pytest.fixture(scope="module", params=ARCHITECTURES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp(request.param), architecture=request.param)


@pytest.fixture(scope="module", params=MIXTURES)
def mixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp(request.param), architecture=request.param)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def few_sequences(seed: int = 0) -> list[TrainingSequence]:
    """transformers computes each alone, so that their number is most of a test's time."""
    return sequences(seed, lengths=(12, 30, 2, 17))


def model_with_gradients(folder: Path, batch: Sequence[TrainingSequence]) -> Any:
    """Return transformers' model with its gradients, sequence by sequence, for GRPO with TIS at ratio 1."""
    model = hugging_face(folder)
    for item in batch:
        ids = torch.from_numpy(item.tokens.astype(np.int64))
        logprobs = torch.log_softmax(model(ids[None]).logits[0, :-1], -1).gather(-1, ids[1:, None])[:, 0]
        importance = (logprobs.detach() - torch.tensor(item.behavior_logprobs[1:])).exp().clamp(max=2.0)
        weight = torch.tensor(item.advantages[1:] * item.loss_weights[1:])
        (-logprobs * importance * weight).sum().backward()
    return model


def test_logprobs_an_export_and_a_step_are_those_of_transformers(kind: str, folder: Path) -> None:
    """In an export each expert has its own name, as engines expect; transformers' own model has two tensors for all.

    The step has an eps of 0.1. With a small eps the first step is only the gradient's sign and would hide a wrong
    factor.
    """
    settings = dataclasses.replace(SETTINGS, eps=0.1, max_grad_norm=1e9)
    (packed,) = pack(few_sequences(), max_tokens=1000)
    with started(kind, folder, optimizer=settings) as backend:
        logprobs = forward(backend, kind, packed)
        exported = weights(backend)
        backend.step(shares(kind, few_sequences()), learning_rate=0.1)
        trained = weights(backend)
    model = model_with_gradients(folder, few_sequences())
    for where in sequence_slices(packed):
        np.testing.assert_allclose(logprobs[where], expected_logprobs(model, packed.tokens[where]), atol=1e-5)

    original = load_file(folder / "model.safetensors")
    assert exported.keys() == original.keys()
    for name, tensor in original.items():
        assert torch.equal(exported[name], tensor), name

    spared = {name for name, p in model.named_parameters() if p.ndim == 1 or name.endswith("_bias")}
    groups = [
        {"params": [p], "weight_decay": 0.0 if name in spared else settings.weight_decay}
        for name, p in model.named_parameters()
    ]

    def named() -> dict[str, torch.Tensor]:
        found = {name: p.detach() for name, p in model.named_parameters()}
        return by_names_in_files(found, model_type=model.config.model_type)

    before = {name: tensor.clone() for name, tensor in named().items()}
    torch.optim.AdamW(groups, lr=0.1, betas=settings.betas, eps=settings.eps).step()
    expected = named()
    assert trained.keys() - {*expected} == {name for name in trained if "e_score_correction_bias" in name}
    for name, weight in expected.items():
        moved = float((weight - before[name]).abs().max())
        assert float((trained[name] - weight).abs().max()) < 3e-4 * moved + 2e-6, name  # near 1, weights round at 1e-7


@pytest.mark.parametrize("architecture", ["qwen3", "glm4_moe", "deepseek_v3"])
def test_outputs_under_yarn_are_those_of_transformers(tmp_path: Path, architecture: str) -> None:
    """DeepSeek-V3 scales the softmax by (0.1 x ln 4 + 1)^2; other families scale cosines and sines by 0.1 x ln 4 +
    1."""
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
    tiny_model(tmp_path, architecture=architecture)
    config = json.loads((tmp_path / "config.json").read_text())
    (packed,) = pack(few_sequences(), max_tokens=1000)
    with started("megatron-1", tmp_path) as backend:
        plain = forward(backend, "megatron-1", packed)
    of_deepseek = {"mscale": 1.0, "mscale_all_dim": 1.0} if architecture == "deepseek_v3" else {}
    config["rope_parameters"] = {**config["rope_parameters"], **yarn, **of_deepseek}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with started("megatron-1", tmp_path) as backend:
        logprobs = forward(backend, "megatron-1", packed)
    model = hugging_face(tmp_path)
    for where in sequence_slices(packed):
        np.testing.assert_allclose(logprobs[where], expected_logprobs(model, packed.tokens[where]), atol=1e-5)
    assert np.abs(logprobs - plain).max() > 1e-2


def test_embeddings_are_scaled_by_a_factor_of_the_run_s_dtype(kind: str, tmp_path: Path) -> None:
    """The square root of 72 is 8.485, and 8.5 in bfloat16. The dtype of the folder does not matter."""
    tiny_model(tmp_path, architecture="gemma3", hidden_size=72)
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    config = json.loads((tmp_path / "config.json").read_text())
    (packed,) = pack(few_sequences(), max_tokens=1000)
    found: dict[str, list[Any]] = {"float32": [], "bfloat16": []}
    for stored, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": stored}))
        written = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        save_file(written, tmp_path / "model.safetensors", metadata={"format": "pt"})
        for of_run, logprobs in found.items():
            with started(kind, tmp_path, dtype=of_run) as backend:
                logprobs.append(forward(backend, kind, packed))
    for one, other in found.values():
        np.testing.assert_array_equal(one, other)
    model = hugging_face(tmp_path)
    for where in sequence_slices(packed):
        expected = expected_logprobs(model, packed.tokens[where])
        np.testing.assert_allclose(found["float32"][0][where], expected, atol=1e-5)


def test_the_bias_of_the_choice_stays_in_float32(kind: str, tmp_path: Path) -> None:
    """This also holds in a bfloat16 model, where rounding would select other experts; 0.3 has no finite binary form."""
    tiny_model(tmp_path, architecture="glm4_moe")
    name, tensors = "model.layers.1.mlp.gate.e_score_correction_bias", load_file(tmp_path / "model.safetensors")
    tensors = {key: tensor if key == name else tensor.bfloat16() for key, tensor in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    with started(kind, tmp_path, dtype="bfloat16") as backend:
        backend.save(tmp_path / "checkpoint")
        backend.restore(tmp_path / "checkpoint")
        backend.step(shares(kind, few_sequences()), learning_rate=LEARNING_RATE)
        exported = weights(backend)
    assert exported["lm_head.weight"].dtype == torch.bfloat16
    assert exported[name].dtype == torch.float32
    assert torch.equal(exported[name], tensors[name])
    assert not torch.equal(tensors[name], tensors[name].bfloat16().float())


@pytest.mark.parametrize(("kind", "dtype"), [("reference", "float32"), ("megatron-1", "bfloat16")])
def test_training_goes_on_from_a_checkpoint_as_if_never_stopped(
    kind: str, mixture: Path, tmp_path: Path, dtype: str
) -> None:
    with started(kind, mixture, dtype=dtype) as backend:
        backend.step(shares(kind, few_sequences(0)), learning_rate=LEARNING_RATE)
        backend.save(tmp_path)
        backend.step(shares(kind, few_sequences(1)), learning_rate=LEARNING_RATE)
        uninterrupted = weights(backend)
    with started(kind, mixture, dtype=dtype) as backend:
        backend.restore(tmp_path)
        backend.step(shares(kind, few_sequences(1)), learning_rate=LEARNING_RATE)
        assert distance(weights(backend), uninterrupted) == 0.0


def test_experts_and_router_that_are_frozen_stay(kind: str, mixture: Path) -> None:
    frozen = (".experts.", ".gate.", ".router.", "e_score_correction_bias")
    settings = dataclasses.replace(SETTINGS, freeze=tuple(map(re.escape, frozen)))
    with started(kind, mixture, optimizer=settings) as backend:
        before = weights(backend)
        backend.step(shares(kind, few_sequences()), learning_rate=LEARNING_RATE)
        after = weights(backend)
    moved = {name for name in after if not torch.equal(after[name], before[name])}
    assert moved == {name for name in after if not any(part in name for part in frozen)}


def test_a_batch_without_response_tokens_trains_no_expert(kind: str, mixture: Path) -> None:
    with started(kind, mixture, optimizer=dataclasses.replace(SETTINGS, weight_decay=0.0)) as backend:
        before = weights(backend)
        metrics = backend.step([[empty()]], learning_rate=LEARNING_RATE).metrics
        assert (metrics["loss"], metrics["grad_norm"]) == (0.0, 0.0)
        assert distance(weights(backend), before) == 0.0


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("reference", {}),
        ("megatron-1", {}),
        pytest.param("megatron-tp2-ep2", {}, marks=RANKS),
        pytest.param("megatron-ep2", {"distributed_optimizer": False}, marks=RANKS),
    ],
)
def test_the_biases_of_experts_do_not_decay(kind: str, options: dict[str, bool], tmp_path: Path) -> None:
    """They are stacked, [experts, features], and still no matrices. All matrices decay: w (1 - 0.5 x 0.1)."""
    with started(kind, tiny_model(tmp_path, architecture="gpt_oss"), options=options) as backend:
        before = weights(backend)
        backend.step([[empty()] for _ in range(num_shares(kind))], learning_rate=0.5)
        after = weights(backend)
    stacked = {name for name, weight in before.items() if name.endswith("_bias") and weight.ndim == 2}
    assert len(stacked) == 4  # two in each layer
    for name, weight in before.items():
        share = 0.95 if weight.ndim > 1 and name not in stacked else 1.0
        torch.testing.assert_close(after[name], share * weight, msg=name)


def test_recomputation_changes_no_number_of_a_mixture(mixture: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[str]()

    def note(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *arguments: (calls.append(option), function(*arguments))[1]

    for name in ("scored_swiglu", "scored_clamped_swiglu"):
        monkeypatch.setattr(fused, name, note(getattr(fused, name)))
    results = {}
    for option in ("none", "selective", "full"):
        with started("megatron-1", mixture, options={"recompute": option}) as backend:
            backend.step(shares("megatron-1", few_sequences()), learning_rate=LEARNING_RATE)
            results[option] = weights(backend)
    for recompute in ("selective", "full"):
        assert distance(results["none"], results[recompute]) == 0.0
        assert calls.count(recompute) == 2 * calls.count("none") > 0


def flash(folder: Path) -> Path:
    """A tiny GLM-4.7-Flash."""
    return tiny_model(folder, architecture="glm4_moe_lite")


def sparse(folder: Path, **entries: Any) -> Path:
    """A tiny DeepSeek-V3.2, whose indexer chooses 8 keys."""
    return tiny_model(folder, architecture="deepseek_v32", entries=entries)


def sparse_and_shared(folder: Path, **entries: Any) -> Path:
    """A tiny GLM-5.2, whose second layer has no indexer."""
    return tiny_model(folder, architecture="glm_moe_dsa", entries=entries)


def logprobs_of(kind: str, folder: Path, batch: Sequence[TrainingSequence]) -> list[NDArray[np.float32]]:
    """Return the logprobs of each sequence of one packed row, and then of the second alone."""
    (packed,), (alone,) = pack(batch, max_tokens=999), pack(batch[1:2], max_tokens=999)
    with started(kind, folder) as backend:
        made, of_second = (forward(backend, kind, row) for row in (packed, alone))
    places = dict(zip(packed.sequences.tolist(), sequence_slices(packed), strict=True))
    return [*(made[places[number]] for number in range(len(batch))), of_second]


def changed(folder: Path, into: Path, **entries: Any) -> Path:
    """Copy a model with other entries of config.json."""
    shutil.copytree(folder, into)
    config = json.loads((folder / "config.json").read_text())
    (into / "config.json").write_text(json.dumps(config | entries))
    return into


def test_documents_longer_than_index_topk_differ_from_dense_attention_and_are_alone_in_a_row(
    kind: str, tmp_path: Path
) -> None:
    folder, batch = sparse(tmp_path / "model"), few_sequences()
    of_dense = logprobs_of(kind, changed(folder, tmp_path / "dense", index_topk=30), batch)
    sparse_ones = logprobs_of(kind, folder, batch)
    np.testing.assert_allclose(sparse_ones[1], sparse_ones[-1], atol=1e-5)
    for made, dense in zip(sparse_ones, of_dense, strict=True):
        is_longer = len(made) > 9  # the last logprob of nine tokens is of eight
        assert (np.abs(made - dense).max() > 0.1) == is_longer


def test_an_interleaved_indexer_is_one_in_halves_with_its_numbers_in_another_order(kind: str, tmp_path: Path) -> None:
    """GLM-5 has indexer_rope_interleave, which SGLang reads, and transformers ignores in some versions."""
    folder, batch = sparse_and_shared(tmp_path / "model", indexer_rope_interleave=False), few_sequences()
    other = changed(folder, tmp_path / "other", indexer_rope_interleave=True)
    as_it_is, tensors = logprobs_of(kind, other, batch), load_file(folder / "model.safetensors")
    pairs = torch.arange(8).view(2, 4).t().flatten()  # (i, i + 4) -> (2 i, 2 i + 1)
    order = torch.cat([pairs, torch.arange(8, 16)])
    for name, tensor in tensors.items():
        if ".indexer." in name and "weights_proj" not in name:
            tensors[name] = tensor.unflatten(0, (-1, 16))[:, order].flatten(0, 1).contiguous()
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    reordered, expected = logprobs_of(kind, other, batch), logprobs_of(kind, folder, batch)
    np.testing.assert_allclose(np.concatenate(reordered), np.concatenate(expected), atol=1e-5)
    assert np.abs(np.concatenate(as_it_is) - np.concatenate(expected)).max() > 0.1


def test_a_stage_that_begins_without_an_indexer_and_indexers_in_fp8_are_refused(tmp_path: Path) -> None:
    folder, two = sparse_and_shared(tmp_path), Layout(ranks=2, pipeline=2)
    refusals.require_trainable(folder, where="model.path", layout=Layout(), transformer={})
    with pytest.raises(ConfigError, match="a stage begins with layer 1, which uses the keys that layer 0 chooses"):
        refusals.require_trainable(folder, where="model.path", layout=two, transformer={})
    with pytest.raises(ConfigError, match="was not tried with an indexer"):
        refusals.require_quantizable(huggingface.read_shape(folder), "fp8")


def test_norms_within_latent_attention_have_the_eps_of_config_json_as_in_engines(tmp_path: Path) -> None:
    """transformers has 1e-6 there, whatever config.json says."""
    folder = flash(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
    model = hugging_face(folder)
    for layer in model.model.layers:
        for norm in (layer.self_attn.q_a_layernorm, layer.self_attn.kv_a_layernorm):
            norm.variance_epsilon = 0.1
    (packed,) = pack(few_sequences(), max_tokens=999)
    with started("megatron-1", folder) as backend:
        logprobs = forward(backend, "megatron-1", packed)
    for where in sequence_slices(packed):
        np.testing.assert_allclose(logprobs[where], expected_logprobs(model, packed.tokens[where]), atol=1e-5)


def moonlight(folder: Path) -> Path:
    """A tiny Moonlight: DeepSeek-V3 whose queries come from the hidden state itself, with one group of experts."""
    tiny_model(folder, architecture="deepseek_v3")
    config = transformers.AutoConfig.from_pretrained(folder)
    config.q_lora_rank, config.n_group, config.topk_group = None, 1, 1
    torch.manual_seed(0)
    config.initializer_range = 0.15
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("make", [flash, moonlight, sparse, sparse_and_shared])
def test_a_model_near_deepseek_v3_has_transformers_logprobs_and_trains_as_the_reference(
    tmp_path: Path, make: Callable[[Path], Path]
) -> None:
    folder = make(tmp_path / "model")
    model, batch = hugging_face(folder), few_sequences()
    (micro_batch,) = pack(batch, max_tokens=999)
    trained = []
    for kind in KINDS:
        with started(kind, folder) as backend:
            made = forward(backend, kind, micro_batch)
            for place, index in zip(sequence_slices(micro_batch), micro_batch.sequences, strict=True):
                np.testing.assert_allclose(made[place], expected_logprobs(model, batch[index].tokens), atol=1e-4)
            backend.step(shares(kind, batch), learning_rate=LEARNING_RATE)
            trained.append(weights(backend))
    assert trained[0].keys() == trained[1].keys() == load_file(folder / "model.safetensors").keys()
    assert distance(*trained) < 1e-4
    of_indexer = {name: one for name, one in load_file(folder / "model.safetensors").items() if ".indexer." in name}
    for after in trained:
        assert all(torch.equal(after[name], tensor) for name, tensor in of_indexer.items())
