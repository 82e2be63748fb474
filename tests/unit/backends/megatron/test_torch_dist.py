"""The ranks' checkpoint is valid for Megatron: its own loader reads it with its own names and offsets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.backends import huggingface
from tests.harness.backends import LEARNING_RATE, sequences, shares, started, tiny_model


@pytest.mark.filterwarnings("ignore::FutureWarning")  # Megatron calls functions that torch has renamed
def test_megatron_reads_model_and_optimizer(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "model", architecture="qwen3_moe")
    shape = huggingface.read_shape(folder)
    assert shape.experts is not None
    experts, size = shape.experts.num_experts, shape.experts.feed_forward_size
    with started("megatron-1", folder) as backend:
        backend.step(shares("megatron-1", sequences()), learning_rate=LEARNING_RATE)
        backend.save(tmp_path / "saved")
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing import ShardedTensor

        own: Any = backend
        policy = own._rank._loaded["policy"]
        (stage,) = policy._stages
        about = dist_checkpointing.load_content_metadata(str(tmp_path / "saved"))
        wanted = stage.sharded_state_dict(metadata=about)
        wanted = {name: one for name, one in wanted.items() if ".experts." not in name and "_extra" not in name}
        expected = {name: one.data.detach().clone() for name, one in wanted.items()}
        for one in wanted.values():
            one.data = torch.zeros_like(one.data)

        def part(key: str, expert: int, start: int, of: torch.Tensor) -> Any:
            """The gate or up part of an expert, as Megatron's expert layers request it."""
            return ShardedTensor.from_rank_offsets(
                key, torch.zeros_like(of), (0, expert, experts), (1, start, 2), prepend_axis_num=1
            )

        weight = policy._parameters["decoder.layers.1.mlp.experts.gate_up"]
        moment = policy._optimizers[0].adamw.state[weight]["exp_avg"]
        key = "decoder.layers.1.mlp.experts.experts.linear_fc1.weight"
        for name, tensor in ((key, weight), (f"optimizer.state.exp_avg.{key}", moment)):
            for expert, both in enumerate(tensor.detach()):
                for start, half in enumerate(both.split(size)):
                    wanted[f"{name}/{expert}/{start}"] = part(name, expert, start, half)
                    expected[f"{name}/{expert}/{start}"] = half.clone()
        found = dist_checkpointing.load(dict(wanted), str(tmp_path / "saved"), validate_access_integrity=False)
    assert len(expected) > 20
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
