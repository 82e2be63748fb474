"""Benchmarks of large models: a grown mixture is the dense model, and every arm is a run that the product accepts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from asyncrl import config
from asyncrl.data.tiny_model import make_tiny_model
from asyncrl.engines.generation import Generation, RequestReport
from benchmarks.gpu import grown, speculation
from benchmarks.gpu.arm import settings
from benchmarks.gpu.grow import grow


def test_a_grown_mixture_computes_what_the_dense_model_does_whatever_its_router_says(tmp_path: Path) -> None:
    dense = make_tiny_model(tmp_path / "dense", architecture="llama")
    mixture = grow(dense, tmp_path / "mixture", experts=4, chosen=2, noise=0.0)
    tokens = torch.arange(4, 24).unsqueeze(0)
    found = []
    for folder in (dense, mixture):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.no_grad():
            found.append(model(tokens).logits)
    assert float((found[0] - found[1]).abs().max()) < 1e-5


def test_noise_tells_experts_apart(tmp_path: Path) -> None:
    dense = make_tiny_model(tmp_path / "dense", architecture="llama")
    model = transformers.AutoModelForCausalLM.from_pretrained(grow(dense, tmp_path / "mixture", experts=3, noise=0.1))
    weights = [tensor for name, tensor in model.state_dict().items() if ".experts." in name]
    assert weights and all(len(torch.unique(tensor.reshape(3, -1)[:, 0])) == 3 for tensor in weights)


@pytest.mark.parametrize("arm", grown.ARMS)
def test_an_arm_of_the_grown_mixture_is_a_run_file(arm: str, tmp_path: Path) -> None:
    options = grown.arguments(["--dense", str(tmp_path), "--set", "learner.threads=1"])
    options.model = tmp_path
    run = config.load(Path(grown.RUN_FILE), settings(grown.overrides(arm, 3, options, tmp_path)))
    assert (run.run.mode, run.run.seed, run.learner.lora.publish) == (arm, 3, "adapter")
    assert run.evaluation.at_start and run.evaluation.at_end


def test_an_evaluation_has_its_mean_and_that_of_each_kind_of_problem() -> None:
    row = {
        "step": 4,
        "evaluation/complete": 1.0,
        "evaluation/held_out/mean@4": 0.5,
        "evaluation/held_out/mean@4/low": 0.4,
        "evaluation/held_out/mean@4/high": 0.6,
        "evaluation/held_out[sums]/mean@4": 0.9,
    }
    (found,) = grown.numbers([row])["held_out"]
    assert found == {"step": 4, "mean": 0.5, "low": 0.4, "high": 0.6, "of": {"sums": 0.9}}


def test_an_arm_of_one_step_has_a_line() -> None:
    assert grown.line({"arm": "sync", "seed": 0, "steps": 1, "batch": 8}).endswith("FAILED: too few steps to measure")


def test_an_arm_without_routing_replay_leaves_its_columns_empty() -> None:
    step = {"learner/step_seconds": 2.0, "reward/mean": 0.5, "mismatch/fresh_mean": 0.25}
    row = {"arm": "sync", "seed": 0, "batch": 8, "seconds": 9.0, **grown.numbers([step])}
    row |= {"tokens_per_second": 5.0, "step_seconds": 2.0, "staleness_mean": 0.0, "staleness_max": 0}
    words = grown.line(row).split()
    assert words[words.index("0.25000") - 2 : words.index("0.25000")] == ["-", "-"]


def test_speculation_is_compared_with_the_plain_engine_of_the_same_windows() -> None:
    def answers(count: int, **report: int) -> list[Generation]:
        tokens, logprobs = np.zeros(count, np.int32), np.zeros(count, np.float32)
        about = {"version_spans": (), "finish_reason": "length", "report": RequestReport(**report)}
        return [Generation(tokens=tokens, logprobs=logprobs, **about)]

    found = speculation.rows_of(
        {
            "plain": [(1.0, answers(100)), (2.0, answers(100))],
            "NGRAM": [(0.5, answers(100, drafted_tokens=80, accepted_tokens=20))] * 2,
        }
    )
    assert found["plain"]["tokens_per_second"] == 75.0
    assert found["NGRAM"]["of_plain"] == pytest.approx(200 / 75)
    assert found["NGRAM"]["accepted"] == 0.25
