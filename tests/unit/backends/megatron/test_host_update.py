"""AdamW on the host trains as AdamW beside the weights, from and to the same checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.backends.megatron import stored_moments
from asyncrl.backends.megatron.host_update import HostUpdate, Shard
from asyncrl.backends.megatron.job import Options
from asyncrl.errors import ConfigError
from tests.harness.backends import LEARNING_RATE, RANKS, distance, sequences, shares, started, tiny_model, weights

IN_16_BITS = {"moments_dtype": "bfloat16", "gradients_dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param("megatron-1", {}, id="one"),
        pytest.param("megatron-1", IN_16_BITS, id="16-bits"),
        # a distributed optimizer for weights, and one for experts, each with gathers of its own
        pytest.param("megatron-ep2-dp2", {}, marks=RANKS, id="ep2-dp2"),
    ],
)
def test_adamw_on_the_host_makes_the_same_weights_to_the_last_bit(
    kind: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients are clipped here. After two steps the models leave their memory, and what is on the host stays; then
    each goes on from the other's checkpoint."""
    monkeypatch.setattr(stored_moments, "PIECE_NUMBERS", 10_000)
    folder = tiny_model(tmp_path / "model", architecture="qwen3_moe")
    norms, trained = [], []
    for device, other in (("learner", "cpu"), ("cpu", "learner")):
        with started(kind, folder, dtype="bfloat16", options={"optimizer_device": device, **options}) as backend:
            for number in range(2):
                metrics = backend.step(shares(kind, sequences(number)), learning_rate=LEARNING_RATE).metrics
                assert ("learner/update_seconds" in metrics) == (device == "cpu")
                norms.append(metrics["grad_norm"])
            if device == "cpu" and kind == "megatron-1":
                own: Any = backend
                mains = [main for part in own._rank._trained["policy"]._optimizers for main in part.weights]
                own.offload()
                assert all(main.untyped_storage().nbytes() for main in mains)
                own.onload()
            backend.save(tmp_path / device)
            backend.step(shares(kind, sequences(2)), learning_rate=LEARNING_RATE)
            trained.append(weights(backend))
            if (tmp_path / other).exists():
                backend.restore(tmp_path / other)
                backend.step(shares(kind, sequences(2)), learning_rate=LEARNING_RATE)
                trained.append(weights(backend))
    assert norms[:2] == pytest.approx(norms[2:], rel=1e-9)  # summed in another order
    assert norms[0] > 0.5
    assert [distance(trained[0], other) for other in trained[1:]] == [0.0, 0.0]


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
def test_a_checkpoint_of_the_host_passes_through_another_layout(tmp_path: Path) -> None:
    folder, kind, other = tiny_model(tmp_path / "model", architecture="qwen3_moe"), "megatron-ep2", "megatron-1"
    on_host: dict[str, Any] = {"dtype": "bfloat16", "options": {"optimizer_device": "cpu"}}
    with started(kind, folder, **on_host) as backend:
        backend.step(shares(kind, sequences(0)), learning_rate=LEARNING_RATE)
        backend.save(tmp_path / "saved")
        backend.step(shares(kind, sequences(1)), learning_rate=LEARNING_RATE)
        expected = weights(backend)
    with started(other, folder, dtype="bfloat16") as backend:
        backend.restore(tmp_path / "saved")
        backend.save(tmp_path / "other")
    with started(kind, folder, **on_host) as backend:
        backend.restore(tmp_path / "other")
        backend.step(shares(kind, sequences(1)), learning_rate=LEARNING_RATE)
        assert distance(weights(backend), expected) == 0.0


def test_the_fused_kernel_of_the_cpu_makes_the_plain_one_s_weights_but_for_rounding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four weights of 10, 30, 5 and 7 numbers in pieces of up to 20: 10, 30, 5 + 7."""
    monkeypatch.setattr(stored_moments, "PIECE_NUMBERS", 20)
    random = torch.Generator().manual_seed(0)
    mains = [torch.randn(size, generator=random) for size in (10, 30, 5, 7)]
    twins = [main.clone() for main in mains]
    adamw = torch.optim.AdamW([{"params": mains[:2]}, {"params": mains[2:], "weight_decay": 0.0}], lr=0.1, fused=True)
    plain = torch.optim.AdamW([{"params": twins[:2]}, {"params": twins[2:], "weight_decay": 0.0}], lr=0.1)
    shards = [
        Shard(main=main, weights=main.to(torch.bfloat16), gradients=torch.empty(main.numel(), dtype=torch.bfloat16))
        for main in mains
    ]
    updated: list[list[int]] = []
    adamw.register_step_pre_hook(
        lambda *_: updated.append([one.numel() for group in adamw.param_groups for one in group["params"]])
    )
    host = HostUpdate(adamw, shards, torch.device("cpu"))
    for _ in range(3):
        for shard, twin in zip(shards, twins, strict=True):
            shard.gradients.copy_(torch.randn(twin.shape, generator=random))
            twin.grad = shard.gradients.float() * 0.25
        host.begin()
        host.scale_gradients(0.25)
        norms = host.norms(lambda main: main is not mains[1])
        counted = [twin.grad.norm() for twin in twins if twin is not twins[1] and twin.grad is not None]
        torch.testing.assert_close(norms, counted)
        host.update()
        plain.step()
        for shard, twin in zip(shards, twins, strict=True):
            torch.testing.assert_close(shard.main, twin, rtol=1e-6, atol=1e-6)
            assert torch.equal(shard.weights, shard.main.to(torch.bfloat16))
            assert shard.main.grad is None
    assert updated == [[10], [30], [5, 7]] * 3
    assert adamw.param_groups[0]["params"] == mains[:2]


def test_moments_are_not_offloaded_twice() -> None:
    with pytest.raises(ConfigError, match=r'^offload_optimizer: with optimizer_device = "cpu" no moments are on .*$'):
        Options(optimizer_device="cpu", offload_optimizer=True)
