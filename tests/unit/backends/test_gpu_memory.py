"""How much of its GPU a learner needs, against what was seen on an H200 (139.8 GiB)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl import config
from asyncrl.backends import gpu_memory
from asyncrl.config import RunConfig
from benchmarks.gpu.shapes import SHAPES, sizes

GIB = 2**30


def run_of(shape: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> RunConfig:
    """A run of a model of this shape, whose weights are not written."""
    kind = SHAPES[shape]
    entries = {
        "hidden_size": kind.hidden,
        "num_hidden_layers": kind.layers,
        "intermediate_size": kind.ffn,
        "num_attention_heads": kind.heads,
        "num_key_value_heads": kind.kv_heads,
        "head_dim": kind.head_size,
        "vocab_size": kind.vocabulary,
    }
    (folder / "config.json").write_text(json.dumps(entries))
    (folder / "run.toml").write_text(f'[model]\npath = "{folder}"\ndtype = "bfloat16"\n[data]\npath = "data"\n')
    monkeypatch.setattr(gpu_memory, "read_shapes", lambda folder: dict(sizes(kind)))
    return config.load(folder / "run.toml", overrides)


def test_a_model_of_06_b_parameters_needs_what_it_was_seen_to_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process held 49.9 GiB at most in rows of 16k tokens, one copy of the weights fewer than the worst case."""
    needed = gpu_memory.learner_bytes(run_of("0.6B", tmp_path, monkeypatch), recomputes_all=False)
    assert 45 * GIB < needed < 55 * GIB


def test_a_model_of_4_b_parameters_leaves_room_for_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of("4B", tmp_path, monkeypatch)
    assert 90 * GIB < gpu_memory.learner_bytes(run, recomputes_all=True) < 110 * GIB
    assert gpu_memory.learner_bytes(run, recomputes_all=False) > 130 * GIB


def test_adapters_need_no_optimizer_for_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of("8B", tmp_path, monkeypatch, "learner.lora.rank=32")
    assert gpu_memory.learner_bytes(run, recomputes_all=True) < 85 * GIB
