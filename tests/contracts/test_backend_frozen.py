"""Policy parameters that are not trained, in every backend, and Megatron's own options."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from asyncrl.backends.kernels import delta_rule
from tests.harness.backends import (
    LEARNING_RATE,
    RANKS,
    SETTINGS,
    critic,
    distance,
    sequences,
    shares,
    started,
    tiny_model,
    weights,
)

FREEZE = {
    "embeddings": {"freeze": ("embed_tokens", "lm_head")},
    "a layer and norms": {"freeze": (r"layers\.0\.", "norm")},
    "all but the head": {"train_only": ("lm_head",)},
    "attention of one layer": {"train_only": (r"layers\.1\.self_attn\.",), "freeze": ("_norm",)},
}


def is_frozen(name: str, patterns: dict[str, tuple[str, ...]]) -> bool:
    only, freeze = patterns.get("train_only", ()), patterns.get("freeze", ())
    chosen = not only or any(re.search(pattern, name) for pattern in only)
    return not chosen or any(re.search(pattern, name) for pattern in freeze)


@pytest.fixture(params=["reference", "megatron-1"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("which", FREEZE)
def test_what_is_frozen_stays_to_the_last_bit_and_the_rest_is_trained(kind: str, folder: Path, which: str) -> None:
    settings = dataclasses.replace(SETTINGS, **FREEZE[which])
    with started(kind, folder, optimizer=settings) as backend:
        before = weights(backend)
        backend.step(shares(kind, sequences()), learning_rate=LEARNING_RATE)
        after = weights(backend)
    moved = {name for name in before if not bool((before[name] == after[name]).all())}
    assert moved == {name for name in before if not is_frozen(name, FREEZE[which])}
    if kind != "reference":
        with started("reference", folder, optimizer=settings) as backend:
            backend.step(shares("reference", sequences()), learning_rate=LEARNING_RATE)
            assert distance(after, weights(backend)) < 1e-4


@pytest.mark.parametrize("kind", [pytest.param("megatron-pp2", marks=RANKS)])
def test_a_pipeline_stage_with_nothing_to_train_scales_no_gradients(kind: str, folder: Path) -> None:
    settings = dataclasses.replace(SETTINGS, train_only=(r"layers\.0\.",), max_grad_norm=1e-3)
    found = []
    for one in ("reference", kind):
        with started(one, folder, optimizer=settings) as backend:
            assert backend.step(shares(one, sequences()), learning_rate=LEARNING_RATE).metrics["grad_norm"] > 1e-3
            found.append(weights(backend))
    assert distance(*found) < 1e-4


@pytest.mark.parametrize("kind", [pytest.param("megatron-tp2-ep2", marks=RANKS)])
@pytest.mark.parametrize("options", [{}, {"distributed_optimizer": False}], ids=["distributed", "replicated"])
def test_ranks_that_share_experts_train_the_experts_alone(kind: str, options: dict[str, bool], tmp_path: Path) -> None:
    """Megatron still has an optimizer of all other weights, around none of torch's."""
    folder = tiny_model(tmp_path / "model", architecture="qwen3_moe")
    settings = dataclasses.replace(SETTINGS, eps=0.1, train_only=(r"mlp\.experts",))
    found = []
    for one in ("reference", kind):
        with started(one, folder, optimizer=settings, options=options) as backend:
            backend.step(shares(one, sequences(0)), learning_rate=0.05)
            backend.save(tmp_path / one)
            for _ in range(2):  # the second time from the checkpoint
                backend.step(shares(one, sequences(1)), learning_rate=0.05)
                found.append(weights(backend))
                backend.restore(tmp_path / one)
    assert distance(found[0], found[2]) < 1e-5
    assert distance(found[2], found[3]) == 0.0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_has_every_weight_whatever_is_frozen_later(
    kind: str, folder: Path, tmp_path: Path, dtype: str
) -> None:
    """Train all weights, then freeze the embeddings, then train all weights again."""
    frozen = dataclasses.replace(SETTINGS, freeze=("embed_tokens",))
    held = None
    for number, settings in enumerate((SETTINGS, frozen, SETTINGS)):
        with started(kind, folder, optimizer=settings, dtype=dtype) as backend:
            if number:
                backend.restore(tmp_path / str(number - 1))
                assert held is not None and distance(weights(backend), held) == 0.0
            backend.step(shares(kind, sequences(number)), learning_rate=LEARNING_RATE)
            backend.save(tmp_path / str(number))
            held = weights(backend)


def test_frozen_embeddings_go_with_full_recomputation(folder: Path) -> None:
    settings = dataclasses.replace(SETTINGS, freeze=("embed_tokens",))
    results = []
    for recompute in ("none", "full"):
        with started("megatron-1", folder, optimizer=settings, options={"recompute": recompute}) as backend:
            backend.step(shares("megatron-1", sequences()), learning_rate=LEARNING_RATE)
            results.append(weights(backend))
    assert distance(*results) < 1e-6


def test_options_of_megatron_reach_its_configuration(folder: Path) -> None:
    fields = {"init_method_std": 0.5, "embedding_init_method_std": 0.4}
    own = dataclasses.replace(critic(folder), megatron={"init_method_std": 0.25})
    with started("megatron-1", folder, transformer=fields, auxiliary={"critic": own}) as backend:
        loaded = backend._started()._loaded  # type: ignore[attr-defined]
        policy, of_critic = (loaded[name]._stages[0].config for name in ("policy", "critic"))
    assert (policy.init_method_std, of_critic.init_method_std) == (0.5, 0.25)
    assert policy.embedding_init_method_std == of_critic.embedding_init_method_std == 0.4


@pytest.mark.parametrize(("choice", "asks"), [("auto", True), ("torch", False)])
def test_linear_attention_asks_for_kernels_unless_plain_torch_is_chosen(
    choice: str, asks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[torch.dtype] = []

    def have_none(x: torch.Tensor) -> bool:
        asked.append(x.dtype)
        return False

    monkeypatch.setattr(delta_rule, "_may_have_kernels", have_none)
    folder = tiny_model(tmp_path / "model", architecture="qwen3_next")
    with started("megatron-1", folder, options={"linear_attention": choice}) as backend:
        backend.forward(shares("megatron-1", sequences()))
    assert bool(asked) == asks
