"""Multi-token-prediction layers learn the policy's tokens, leave the policy alone, and are exported for engines."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from asyncrl import config
from asyncrl.backends.megatron import refusals
from asyncrl.errors import ConfigError
from asyncrl.tensors.model_tensors import check_layout, trained_shapes
from tests import ROOT
from tests.harness.backends import (
    RANKS,
    SETTINGS,
    hugging_face,
    sequences,
    shares,
    started,
    weights,
    with_draft_layer,
)

SMOOTH = dataclasses.replace(SETTINGS, eps=0.1, max_grad_norm=1e9)
"""A step that shows the size of a gradient, and is not clipped."""
COEFFICIENT = 0.5
DRAFT = "model.layers.2."


@pytest.fixture(scope="module", params=["deepseek_v3", "glm4_moe"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_draft_layer(tmp_path_factory.mktemp(request.param), request.param)


class Drafting:
    """The same by transformers' modules: the draft layer is layer 2 of a model of three, given another input."""

    def __init__(self, folder: Path) -> None:
        self.policy = hugging_face(folder)
        self.three = hugging_face(folder.parent / "three")
        names = {"enorm", "hnorm", "eh_proj", "shared_head.norm"}
        read = load_file(folder / "model.safetensors")
        self.own = {name: read[f"{DRAFT}{name}.weight"].requires_grad_() for name in names}
        self._eps = self.policy.config.rms_norm_eps

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._eps) * self.own[name]

    def loss(self, tokens: np.ndarray, weights: np.ndarray) -> torch.Tensor:
        """Return the weighted negative log likelihood of tokens 2, 3, ... of one sequence."""
        ids = torch.from_numpy(tokens.astype(np.int64))[None]
        with torch.no_grad():
            hidden = self.policy.model(ids).last_hidden_state
            embedded = self.policy.model.embed_tokens(torch.roll(ids, -1, 1))
        joined = torch.cat([self._norm(embedded, "enorm"), self._norm(hidden, "hnorm")], -1) @ self.own["eh_proj"].t()
        after: list[torch.Tensor] = []
        layer = self.three.model.layers[2]
        handles = [
            layer.register_forward_pre_hook(lambda _, args, kwargs: ((joined, *args[1:]), kwargs), with_kwargs=True),
            layer.register_forward_hook(lambda _, __, made: after.append(made)),
        ]
        self.three.model(ids)
        for handle in handles:
            handle.remove()
        logits = self._norm(after[0], "shared_head.norm") @ self.policy.lm_head.weight.detach().t()
        found = torch.log_softmax(logits[0, :-2], -1).gather(-1, ids[0, 2:, None])[:, 0]
        return -(found * torch.from_numpy(weights[2:])).sum()

    def parameters(self) -> dict[str, torch.Tensor]:
        layer = {f"{DRAFT}{name}": p for name, p in self.three.model.layers[2].named_parameters()}
        return layer | {f"{DRAFT}{name}.weight": p for name, p in self.own.items()}


@pytest.mark.parametrize(
    "kind", ["megatron-1", *(pytest.param(k, marks=RANKS) for k in ("megatron-tp2", "megatron-ep2"))]
)
def test_a_draft_layer_learns_the_policys_tokens_and_the_policy_is_that_of_a_run_without(
    kind: str, folder: Path, tmp_path: Path
) -> None:
    batch = sequences()
    options = {"draft_coefficient": COEFFICIENT}
    with started(kind, folder, optimizer=SMOOTH) as backend:
        plain_metrics = backend.step(shares(kind, batch), learning_rate=0.1).metrics
        plain = weights(backend)
    with started(kind, folder, optimizer=SMOOTH, options=options) as backend:
        before = weights(backend)
        metrics = backend.step(shares(kind, batch), learning_rate=0.1).metrics
        trained = weights(backend)
        backend.save(tmp_path / "saved")
        backend.step(shares(kind, batch), learning_rate=0.1)
        backend.restore(tmp_path / "saved")
        restored = weights(backend)
    original = load_file(folder / "model.safetensors")
    assert before.keys() == original.keys(), "the engine's names of a draft model"
    assert all(torch.equal(before[name], original[name]) for name in original)
    assert all(torch.equal(trained[name], restored[name]) for name in trained)
    assert plain.keys() == {name for name in original if not name.startswith(DRAFT)}
    assert all(torch.equal(trained[name], plain[name]) for name in plain)
    assert metrics["loss"] == plain_metrics["loss"]

    drafting = Drafting(folder)
    total = sum((drafting.loss(one.tokens, one.loss_weights) for one in batch), start=torch.zeros(()))
    assert metrics["learner/draft_loss"] == pytest.approx(float(total.detach()), rel=1e-4)
    (COEFFICIENT * total).backward()
    moved = 0.0
    for name, parameter in drafting.parameters().items():
        for theirs, expected in _stepped(name, parameter).items():
            np.testing.assert_allclose(trained[theirs], expected, atol=2e-5, err_msg=theirs)
            moved = max(moved, float((trained[theirs] - original[theirs]).abs().max()))
    assert moved > 1e-3


def _stepped(name: str, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors of a parameter by their names in files, after AdamW's first step."""
    decay = SMOOTH.weight_decay if parameter.ndim > 1 else 0.0
    moving = parameter.detach().clone()
    gradient = torch.zeros_like(moving) if parameter.grad is None else parameter.grad
    moving -= 0.1 * (gradient / (gradient.abs() + SMOOTH.eps) + decay * moving)
    if name.endswith("experts.gate_up_proj"):
        halves = (
            (e, x, half) for e, one in enumerate(moving) for x, half in zip(("gate", "up"), one.chunk(2), strict=True)
        )
        return {name.replace("gate_up_proj", f"{e}.{x}_proj.weight"): half for e, x, half in halves}
    if name.endswith("experts.down_proj"):
        return {name.replace("down_proj", f"{e}.down_proj.weight"): one for e, one in enumerate(moving)}
    return {name: moving}


def test_engines_without_a_draft_model_take_the_weights_and_leave_its_layers(folder: Path) -> None:
    exported = {name: tuple(tensor.shape) for name, tensor in load_file(folder / "model.safetensors").items()}
    expected = trained_shapes(exported, json.loads((folder / "config.json").read_text()))
    assert len(expected) < len(exported)
    check_layout(exported, expected=expected, optional=frozenset(), where="weights")


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["model.path={plain}"], "the model has no multi-token-prediction layers that asyncrl trains"),
        (["learner.pipeline_parallel=2", "learner.ranks=2"], "learner.pipeline_parallel = 2 has them elsewhere"),
        (["learner.context_parallel=2", "learner.ranks=2"], "learner.context_parallel = 2 has them elsewhere"),
        (["learner.lora.rank=4"], "with learner.lora only adapters are trained"),
    ],
)
def test_what_trains_no_draft_layer_is_refused_in_one_line(folder: Path, overrides: list[str], says: str) -> None:
    common: list[Any] = [f"model.path={folder}", "learner.options.draft_coefficient=0.2"]
    made = [one.format(plain=folder.parent / "three") for one in overrides]
    run = config.load(ROOT / "examples" / "demo.toml", [*common, *made])
    with pytest.raises(ConfigError, match=f"learner.options.draft_coefficient: .*{says}"):
        refusals.require_draft_layers(run)
