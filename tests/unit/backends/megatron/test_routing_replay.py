"""Routing replay: the learner sends tokens to the experts that the engine chose.

The engine is our in-process engine. Its experts arrive with its samples, as they do over the bus.
"""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from asyncrl.engines.generation import Generation
from asyncrl.engines.inprocess.engine import InProcessEngine, Options
from asyncrl.messages import SamplingParams
from asyncrl.messages.routing import NO_EXPERTS
from asyncrl.policies.batching.packing import MicroBatch, TrainingSequence
from tests.harness.backends import (
    RANKS,
    SETTINGS,
    forward,
    learned,
    sequence,
    shares,
    started,
    tiny_model,
    weights,
)
from tests.harness.backends import sequences as random_sequences
from tests.harness.packing import pack

PROMPTS = [np.arange(4 + n, 4 + n + 6 + 3 * n, dtype=np.int32) % 40 + 4 for n in range(8)]
KINDS = ("vpp2", "pp2-cp2", "tp2-ep2")
GENTLE = dataclasses.replace(SETTINGS, eps=0.1, max_grad_norm=1e6)
SAMPLING = SamplingParams(max_new_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), architecture="qwen3_moe", num_layers=4)


def answers(folder: Path, dtype: str) -> list[Generation]:
    async def sample() -> list[Generation]:
        engine = InProcessEngine(
            folder, device="cpu", dtype=dtype, version=(0, 0), options=Options(threads=1), reports_experts=True
        )
        await engine.start()
        try:
            return list(await asyncio.gather(*(engine.generate(p, SAMPLING, seed=n) for n, p in enumerate(PROMPTS))))
        finally:
            await engine.close()

    return asyncio.run(sample())


def sequences(generations: list[Generation]) -> list[TrainingSequence]:
    made = []
    for prompt, answer in zip(PROMPTS, generations, strict=True):
        tokens = np.concatenate([prompt, answer.tokens])
        mask = np.arange(len(tokens)) >= len(prompt)
        logprobs = np.concatenate([np.zeros(len(prompt), np.float32), answer.logprobs])
        made.append(
            dataclasses.replace(
                sequence(len(tokens), seed=len(prompt)),
                tokens=tokens,
                response_mask=mask,
                behavior_logprobs=logprobs,
                staleness=np.zeros(len(tokens), np.int32),
                experts=answer.experts,
            )
        )
    return made


def row(generations: list[Generation]) -> MicroBatch:
    (packed,) = pack(sequences(generations), max_tokens=10_000)
    return packed


def mismatch(logprobs: NDArray[np.float32], packed: MicroBatch) -> NDArray[np.float64]:
    """Trainer logprob minus engine logprob of each sampled token."""
    return (logprobs.astype(np.float64) - packed.behavior_logprobs)[packed.response_mask]


def k3(difference: NDArray[np.float64]) -> float:
    """The k3 estimator of KL(engine || trainer), http://joschu.net/blog/kl-approx.html"""
    return float((np.exp(difference) - 1 - difference).mean())


def without(packed: MicroBatch) -> MicroBatch:
    return dataclasses.replace(packed, experts=NO_EXPERTS)


def test_engine_reports_experts_of_all_but_the_last_token(folder: Path) -> None:
    for prompt, answer in zip(PROMPTS, answers(folder, "float32"), strict=True):
        assert answer.experts.shape == (len(prompt) + 40, 4, 2)
        assert answer.experts.dtype == np.uint8
        assert (answer.experts[:-1] < 8).all()
        assert (answer.experts[-1] == 255).all()


def test_replay_brings_bfloat16_logprobs_near_the_engine(folder: Path) -> None:
    packed = row(answers(folder, "bfloat16"))
    with started("megatron-1", folder, dtype="bfloat16") as backend:
        own = mismatch(forward(backend, "megatron-1", without(packed)), packed)
        replayed = mismatch(forward(backend, "megatron-1", packed), packed)
    assert k3(own) > 3 * k3(replayed)
    assert np.abs(own).max() > 3 * np.abs(replayed).max()


def test_replay_keeps_float32_scores(folder: Path) -> None:
    packed = row(answers(folder, "float32"))
    with started("megatron-1", folder) as backend:
        own, replayed = (forward(backend, "megatron-1", one) for one in (without(packed), packed))
    np.testing.assert_array_equal(own, replayed)
    assert np.abs(mismatch(own, packed)).max() < 1e-5


@pytest.mark.parametrize("architecture", ["glm4_moe", "deepseek_v3"])
def test_experts_are_those_of_their_layer_where_the_first_has_none(tmp_path: Path, architecture: str) -> None:
    """With shared experts, and with DeepSeek-V3's groups of experts."""
    folder = tiny_model(tmp_path, architecture=architecture, num_layers=3)
    packed = row(answers(folder, "float32"))
    assert (packed.experts[:, 0] == 255).all()
    others = dataclasses.replace(packed, experts=np.concatenate([packed.experts[:, :1], packed.experts[:, :0:-1]], 1))
    with started("megatron-1", folder) as backend:
        own, replayed, wrong = (forward(backend, "megatron-1", one) for one in (without(packed), packed, others))
    np.testing.assert_allclose(own, replayed, atol=1e-5)  # an engine may list a token's experts in another order
    assert np.abs(mismatch(replayed, packed)).max() < 1e-5
    assert np.abs(mismatch(wrong, packed)).max() > 0.1


def far_from_its_own(number: int) -> list[TrainingSequence]:
    """Sequences with experts that no router would choose; the second sequence names no experts."""
    random = np.random.default_rng(number)
    made = []
    for one in random_sequences(number):
        experts = random.permuted(np.tile(np.arange(8, dtype=np.uint8), (len(one), 4, 1)), axis=-1)[..., :2]
        experts[-1] = 255
        made.append(dataclasses.replace(one, experts=experts))
    made[1] = dataclasses.replace(made[1], experts=NO_EXPERTS)
    return made


def trained(kind: str, folder: Path, *, with_experts: bool = True, **options: Any) -> Any:
    """Return the logprobs of a row, the metrics of a step, and the weights after the step."""
    batch = far_from_its_own(0)
    if not with_experts:
        batch = [dataclasses.replace(one, experts=NO_EXPERTS) for one in batch]
    (packed,) = pack(batch, max_tokens=1000)
    with started(kind, folder, optimizer=GENTLE, **({"options": options} if options else {})) as backend:
        logprobs = forward(backend, kind, packed)
        metrics = learned(backend.step(shares(kind, batch, max_tokens=30), learning_rate=0.05).metrics)
        return logprobs, metrics, weights(backend)


@pytest.fixture(scope="module")
def on_one_rank(folder: Path) -> Any:
    return trained("megatron-1", folder)


def test_replay_changes_what_is_trained(folder: Path, on_one_rank: Any) -> None:
    """Without this, the tests below would prove nothing."""
    logprobs, metrics, _ = trained("megatron-1", folder, with_experts=False)
    assert np.abs(logprobs - on_one_rank[0]).max() > 0.1
    assert abs(metrics["loss"] / on_one_rank[1]["loss"] - 1) > 0.01


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param("megatron-1", {"recompute": "full"}, id="full"),
        pytest.param("megatron-1", {"recompute": "selective"}, id="selective"),
        pytest.param("megatron-pp2", {"recompute": "full"}, id="pp2-full", marks=RANKS),
        *(pytest.param(f"megatron-{kind}", {}, id=kind, marks=RANKS) for kind in KINDS),
    ],
)
def test_every_layout_and_recomputation_replays_the_same(
    folder: Path, on_one_rank: Any, kind: str, options: dict[str, Any]
) -> None:
    logprobs, metrics, after = trained(kind, folder, **options)
    np.testing.assert_allclose(logprobs, on_one_rank[0], atol=1e-5)
    assert metrics == pytest.approx(on_one_rank[1], rel=1e-3, abs=1e-6)
    for name, weight in on_one_rank[2].items():
        torch.testing.assert_close(after[name], weight, atol=2e-5, rtol=1e-4)


def test_steps_replay_the_experts_that_the_learner_itself_chose_for_the_logprobs(folder: Path) -> None:
    """Two steps on a batch with the learner's own choice replayed are those with the same experts from an engine."""
    batch = random_sequences(3)
    rows = shares("megatron-1", batch)
    made = {}
    experts: dict[bytes, NDArray[Any]] = {}
    for how in ("recorded", "given", "own"):
        options = {"replay_own_routing": how == "recorded"}
        with started("megatron-1", folder, options=options, optimizer=GENTLE) as backend:
            if how == "recorded":
                np.testing.assert_array_equal(
                    np.concatenate(backend.forward_recorded(rows)[0]),  # type: ignore[attr-defined]
                    np.concatenate(backend.forward(rows)[0]),
                )
                for key, routing in backend._rank._loaded["policy"].routing.items():  # type: ignore[attr-defined]
                    assert sorted(routing.by_layer) == [1, 2, 3, 4]
                    by_layer = torch.stack([routing.by_layer[layer] for layer in (1, 2, 3, 4)], dim=1)
                    experts[key] = by_layer.numpy().astype(np.uint8)
            trained = rows
            if how == "given":
                trained = [[dataclasses.replace(r, experts=experts[r.sequences.tobytes()]) for r in rows[0]]]
            for _ in range(2):
                backend.step(trained, learning_rate=0.3)
            made[how] = weights(backend)
    difference = {how: max(float((made[how][n] - made["recorded"][n]).abs().max()) for n in made[how]) for how in made}
    assert difference["given"] == 0.0
    assert difference["own"] > 0.0


def test_a_recorded_routing_is_not_used_for_other_rows(folder: Path) -> None:
    rows, others = (shares("megatron-1", random_sequences(seed)) for seed in (3, 4))
    with started("megatron-1", folder, options={"replay_own_routing": True}) as backend:
        expected = backend.forward(others)
        backend.forward_recorded(rows)  # type: ignore[attr-defined]
        for made, one in zip(backend.forward(others)[0], expected[0], strict=True):
            np.testing.assert_array_equal(made, one)
        backend.forward_recorded(others)  # type: ignore[attr-defined]
        assert len(backend._rank._loaded["policy"].routing) == len(others[0])  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [pytest.param(k, marks=RANKS) for k in ("megatron-tp2-ep2", "megatron-pp2-cp2")])
def test_ranks_replay_their_own_routing_as_one_process_does(kind: str, folder: Path) -> None:
    made = []
    for one in ("megatron-1", kind):
        with started(one, folder, options={"replay_own_routing": True}, optimizer=GENTLE) as backend:
            rows = shares(one, random_sequences(3))
            backend.forward_recorded(rows)  # type: ignore[attr-defined]
            for _ in range(2):
                backend.step(rows, learning_rate=0.3)
            made.append(weights(backend))
    assert max(float((made[0][name] - made[1][name]).abs().max()) for name in made[0]) < 1e-3
