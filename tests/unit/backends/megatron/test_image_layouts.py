"""Models that read images train the same in every layout of ranks as in one process.

Rows show pictures at the borders of what ranks hold, and some ranks and micro-batches have no picture at all.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from asyncrl.config.learner import VISION_TOWER
from asyncrl.policies.batching.packing import pack_for_ranks, sequence_slices
from tests.harness.backends import LAYOUTS, SETTINGS, distance, forward, learned, num_shares, shares, started, weights
from tests.harness.images import answers_to_pictures, expected_of, pictured_sequences, tiny_vision_model, vision_model
from tests.harness.packing import pack

GENTLE = dataclasses.replace(SETTINGS, eps=0.1, max_grad_norm=1e6)
FROZEN = dataclasses.replace(GENTLE, freeze=(VISION_TOWER,))
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ranks")]


@pytest.mark.parametrize(
    ("kind", "architecture", "settings", "options"),
    [
        ("megatron-cp2-tp2", "qwen2_5_vl", GENTLE, {}),
        ("megatron-pp2-dp2", "qwen3_vl", GENTLE, {}),
        ("megatron-tp2", "qwen3_vl", GENTLE, {"recompute": "selective"}),
        ("megatron-4", "qwen2_5_vl", GENTLE, {"distributed_optimizer": False}),
        ("megatron-vpp2", "qwen2_5_vl-tied", FROZEN, {"recompute": "full"}),
        ("megatron-tp2-ep2", "qwen3_vl_moe", FROZEN, {"recompute": "full"}),
        ("megatron-tp2-ep2", "qwen3_5_moe", GENTLE, {}),
    ],
)
def test_a_layout_says_what_transformers_says_and_trains_as_one_process(
    tmp_path: Path, kind: str, architecture: str, settings: Any, options: dict[str, Any]
) -> None:
    architecture, _, is_tied = architecture.partition("-")
    tied = {"tie_word_embeddings": bool(is_tied)}
    num_layers = 4 if LAYOUTS[kind].pipeline > 1 else 2  # two stages of two pieces
    folder = tiny_vision_model(tmp_path / "model", architecture=architecture, num_layers=num_layers, **tied)
    batch = pictured_sequences(folder)
    (packed,) = pack(batch, max_tokens=1000)
    found = []
    for one in ("reference", kind):
        with started(one, folder, optimizer=settings, **({"options": options} if one == kind else {})) as backend:
            if one == kind:
                logprobs, exported = forward(backend, kind, packed), weights(backend)
            metrics = []
            for number in range(2):
                cut = shares(one, pictured_sequences(folder, seed=number), max_tokens=45)
                metrics.append(learned(backend.step(cut, learning_rate=0.05).metrics))
                if not number:
                    backend.save(tmp_path / one)
            found.append((metrics, weights(backend)))
            backend.restore(tmp_path / one)
            backend.step(cut, learning_rate=0.05)
            assert distance(weights(backend), found[-1][1]) == 0.0, "a step after a checkpoint repeats"
    expected = expected_of(vision_model(folder), batch)
    for where, number in zip(sequence_slices(packed), packed.sequences, strict=True):
        np.testing.assert_allclose(logprobs[where], expected[number], atol=5e-5)
    original = load_file(folder / "model.safetensors")
    assert exported.keys() == original.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in original.items())
    (wanted_metrics, wanted), (got_metrics, got) = found
    for one_got, one_wanted in zip(got_metrics, wanted_metrics, strict=True):
        assert one_got == pytest.approx(one_wanted, rel=1e-4, abs=1e-5)
    of_tower = {name for name in wanted if "visual." in name}
    for names in (of_tower, wanted.keys() - of_tower):
        moved, apart = (
            distance({n: a[n] for n in names}, {n: b[n] for n in names}) for a, b in ((original, wanted), (got, wanted))
        )
        assert apart <= 3e-4 * moved
        assert (moved > 0) == (names != of_tower or settings is GENTLE)


@pytest.mark.parametrize("kind", ["megatron-1", "megatron-cp2-tp2"])
def test_answers_share_a_prompt_with_its_picture_and_train_as_whole_ones(tmp_path: Path, kind: str) -> None:
    """Prompts whose pictures differ share what comes before these."""
    folder = tiny_vision_model(tmp_path, architecture="qwen3_vl")
    batch = answers_to_pictures(folder)
    results = []
    for shares_prefixes in (False, True):
        ranks = num_shares(kind)
        cut = pack_for_ranks(batch, ranks=ranks, max_tokens=200, shares_prefixes=shares_prefixes)
        with started(kind, folder, optimizer=GENTLE) as backend:
            metrics = learned(backend.step(cut, learning_rate=0.05).metrics)
            results.append((metrics, weights(backend)))
    assert sorted(cut[0][0].shared.tolist()) == [0, 3, 10, 10, 10, 10, 10, 10]
    (whole, wanted), (shared, got) = results
    assert shared == pytest.approx(whole, rel=1e-4, abs=1e-5)
    moved = distance(load_file(folder / "model.safetensors"), wanted)
    assert distance(got, wanted) < 3e-4 * moved
