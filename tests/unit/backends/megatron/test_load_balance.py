"""The load-balancing loss of a mixture's routers equals the paper's, under every layout, and evens their use."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from asyncrl.backends.megatron.job import Options
from asyncrl.backends.megatron.mixture import OwnExperts
from asyncrl.backends.port import Backend
from asyncrl.config import tables
from asyncrl.errors import ConfigError
from asyncrl.policies.batching.packing import MicroBatch, empty, sequence_slices
from asyncrl.tensors.transformers_models import by_names_in_files
from tests.harness.backends import (
    RANKS,
    SETTINGS,
    distance,
    gradients_of_megatron,
    hugging_face,
    num_shares,
    sequences,
    started,
    tiny_model,
    weights,
)
from tests.harness.packing import pack

COEFFICIENT = 0.3
WITH_LOSS = {"aux_loss_coefficient": COEFFICIENT}
GENTLE = dataclasses.replace(SETTINGS, eps=0.1, max_grad_norm=1e9)
LAYOUTS = (
    ("megatron-cp2-ep2", "glm4_moe", {"recompute": "full"}),
    ("megatron-pp2-ep2", "qwen3_moe", {}),
    ("megatron-vpp2", "gpt_oss", {"recompute": "full"}),
    ("megatron-tp2-ep4", "gpt_oss", {"recompute": "selective"}),
)


@pytest.fixture(scope="module", params=["qwen3_moe", "qwen3_next", "glm4_moe", "deepseek_v3", "gpt_oss"])
def mixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp(request.param), architecture=request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), architecture="qwen3_moe")


def rows() -> list[MicroBatch]:
    """Rows of 35, 37 and 38 tokens, so that ranks fill some of them up, with a policy loss of 0."""
    packed = pack(
        [dataclasses.replace(one, advantages=np.zeros_like(one.advantages)) for one in sequences()], max_tokens=45
    )
    assert [row.num_tokens for row in packed] == [35, 37, 38]
    return packed


def dealt(kind: str, packed: Sequence[MicroBatch]) -> list[list[MicroBatch]]:
    """The same rows for any number of copies of the model; the last ones have fewer."""
    return [list(packed[copy :: num_shares(kind)]) or [empty()] for copy in range(num_shares(kind))]


@dataclasses.dataclass(frozen=True)
class ByHand:
    """loss: mean over tokens and layers;  chosen: i64[layers, E], as the paper counts it"""

    gradients: Mapping[str, torch.Tensor]
    loss: float
    chosen: torch.Tensor


def by_hand(folder: Path, packed: Sequence[MicroBatch]) -> ByHand:
    """The loss from what transformers' routers see, sequence by sequence."""
    model = hugging_face(folder)
    seen: dict[str, list[torch.Tensor]] = defaultdict(list)
    gates = {name: part for name, part in model.named_modules() if name.endswith(("mlp.gate", "mlp.router"))}
    gates = {name: part for name, part in gates.items() if hasattr(part, "weight")}
    for name, gate in gates.items():
        gate.register_forward_pre_hook(lambda _, inputs, name=name: seen[name].append(inputs[0]))
    config = model.config
    experts_per_token = config.num_experts_per_tok
    num_tokens = sum(row.num_tokens for row in packed)
    total, chosen = torch.zeros(()), []
    for row in packed:
        seen.clear()
        for where in sequence_slices(row):
            model(torch.from_numpy(row.tokens[where].astype(np.int64))[None])
        of_layers = []
        for name, gate in gates.items():
            hidden = torch.cat([one.reshape(-1, one.shape[-1]) for one in seen[name]])
            logits = F.linear(hidden, gate.weight, getattr(gate, "bias", None))
            scores = logits.sigmoid() if hasattr(gate, "e_score_correction_bias") else logits.softmax(-1)
            scores = scores / scores.sum(-1, keepdim=True)
            counts = torch.bincount(scores.topk(experts_per_token).indices.flatten(), minlength=scores.shape[1])
            shares = counts / (len(hidden) * experts_per_token)
            loss = scores.shape[1] * (shares * scores.mean(0)).sum()
            total = total + loss * row.num_tokens / num_tokens
            of_layers.append(counts)
        chosen.append(torch.stack(of_layers))
    (COEFFICIENT * total).backward()
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    return ByHand(
        gradients=by_names_in_files(gradients, model_type=config.model_type),
        loss=float(total.detach()) / len(gates),
        chosen=torch.stack(chosen).sum(0),
    )


def metrics_of_step(backend: Backend, packed: Sequence[MicroBatch]) -> Mapping[str, float]:
    return backend.step([list(packed)], learning_rate=0.0).metrics


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_loss_and_gradients_are_those_of_the_paper(mixture: Path, recompute: str) -> None:
    expected = by_hand(mixture, rows())
    with started("megatron-1", mixture, optimizer=GENTLE, options={**WITH_LOSS, "recompute": recompute}) as backend:
        metrics = metrics_of_step(backend, rows())
        found = gradients_of_megatron(backend)
    assert metrics["learner/aux_loss"] == pytest.approx(expected.loss, rel=1e-5)
    assert found.keys() == expected.gradients.keys()
    routers = 0
    for name, gradient in expected.gradients.items():
        scale = float(gradient.abs().max())
        assert float((found[name] - gradient).abs().max()) < 1e-4 * scale + 1e-8, name
        routers += scale > 0 and ("mlp.gate.weight" in name or "mlp.router.weight" in name)
    assert routers


def test_balance_loss_is_added_to_the_policy_loss(folder: Path) -> None:
    packed = pack(sequences(), max_tokens=45)
    found = {}
    for coefficient in (0.0, COEFFICIENT, 2 * COEFFICIENT):
        with started("megatron-1", folder, optimizer=GENTLE, options={"aux_loss_coefficient": coefficient}) as backend:
            metrics = metrics_of_step(backend, packed)
            found[coefficient] = gradients_of_megatron(backend)
        assert ("learner/aux_loss" in metrics) == (coefficient > 0)
    for name, without in found[0.0].items():
        once, twice = found[COEFFICIENT][name] - without, found[2 * COEFFICIENT][name] - without
        torch.testing.assert_close(2 * once, twice, rtol=1e-3, atol=1e-5 * float(without.abs().max()) + 1e-7)
        assert float(once.abs().max()) > 0 or ".experts." in name or "lm_head" in name or "model.norm" in name, name


def test_metrics_tell_how_unevenly_a_batch_uses_the_experts(folder: Path) -> None:
    chosen = by_hand(folder, rows()).chosen.double()
    with started("megatron-1", folder) as backend:
        metrics = metrics_of_step(backend, rows())
    most = (chosen.amax(1) / chosen.mean(1)).mean()
    assert metrics["learner/expert_load_max"] == pytest.approx(float(most))
    assert metrics["learner/experts_unused"] == pytest.approx(float((chosen == 0).double().mean()))


@pytest.mark.parametrize(
    ("kind", "architecture", "options"), [pytest.param(*layout, marks=RANKS) for layout in LAYOUTS]
)
def test_every_layout_trains_the_balance_loss_as_one_process(
    tmp_path: Path, kind: str, architecture: str, options: Mapping[str, Any]
) -> None:
    """The ranks share experts, rows or layers. Rows are filled up to a length that ranks can share, and copies get
    different numbers of rows."""
    folder = tiny_model(tmp_path / "model", architecture=architecture, num_layers=4)
    found = []
    for one, own in (("megatron-1", {}), (kind, dict(options))):
        with started(one, folder, optimizer=GENTLE, options={**WITH_LOSS, **own}) as backend:
            before = weights(backend)
            metrics = backend.step(dealt(one, rows()), learning_rate=0.1).metrics
            found.append((metrics, weights(backend)))
    (expected, alone), (metrics, together) = found
    for name in ("learner/aux_loss", "learner/expert_load_max", "learner/experts_unused", "grad_norm"):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-4), name
    moved = distance(alone, before)
    assert moved > 1e-4
    assert distance(together, alone) < 1e-3 * moved


def test_what_the_engine_chose_counts_for_the_load_and_the_routers_own_choice_for_the_loss(folder: Path) -> None:
    (alone,) = pack([sequences()[0]], max_tokens=100)
    layers, experts_per_token, num_experts = 2, 2, 8
    chosen = np.zeros((alone.num_tokens, layers, experts_per_token), np.uint8)
    chosen[..., 1] = 1  # all tokens to experts 0 and 1
    one_layer = tiny_model(folder.parent / "one", architecture="qwen3_moe", num_layers=1)  # others see other inputs
    for where, replayed in ((folder, chosen), (one_layer, chosen[:, :1])):
        with started("megatron-1", where, options=WITH_LOSS) as backend:
            own = metrics_of_step(backend, [alone])
            told = metrics_of_step(backend, [dataclasses.replace(alone, experts=replayed)])
        assert told["learner/expert_load_max"] == pytest.approx(num_experts / experts_per_token)
        assert told["learner/experts_unused"] == pytest.approx(1 - experts_per_token / num_experts)
        assert own["learner/expert_load_max"] < num_experts / experts_per_token
    assert told["learner/aux_loss"] == pytest.approx(own["learner/aux_loss"], rel=1e-6)


@pytest.mark.parametrize("wrong", [-0.1, float("nan"), float("inf")])
def test_negative_or_infinite_coefficient_is_refused(wrong: float) -> None:
    with pytest.raises(ConfigError, match="aux_loss_coefficient must be (>= 0|finite)"):
        tables.build(Options, {"aux_loss_coefficient": wrong}, "learner.options")


def test_dispatch_on_one_rank_never_synchronises() -> None:
    """Three tokens, three experts, two per token; every row returns times its score. On "meta" a wait is impossible."""
    routing_map = torch.tensor([[True, False, True], [True, True, False], [False, True, True]])
    scores = torch.tensor([[0.25, 0.0, 0.75], [0.5, 0.5, 0.0], [0.0, 0.125, 0.875]]).requires_grad_()
    hidden = torch.arange(6.0).view(3, 1, 2).requires_grad_()
    experts = OwnExperts(2)
    rows, own = experts.dispatch_postprocess(
        *experts.token_dispatch(*experts.dispatch_preprocess(hidden, routing_map, scores))
    )[::2]
    assert rows.tolist() == [[0, 1], [2, 3], [2, 3], [4, 5], [0, 1], [4, 5]]
    assert own.tolist() == [0.25, 0.5, 0.5, 0.125, 0.75, 0.875]
    back = experts.combine_postprocess(experts.token_combine(experts.combine_preprocess(rows * own[:, None])))
    torch.testing.assert_close(back, hidden)
    of_hidden, of_scores = torch.autograd.grad(back.sum(), (hidden, scores))
    torch.testing.assert_close(of_hidden, torch.ones(3, 1, 2))
    torch.testing.assert_close(of_scores, torch.tensor([[1.0], [5.0], [9.0]]) * routing_map)
    on_meta = [x.detach().to("meta") for x in (hidden, routing_map, scores)]
    assert OwnExperts(2).dispatch_preprocess(*on_meta)[0].shape == (6, 2)
