"""What an engine samples from, and which weights it accepts."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from asyncrl.engines.inprocess.decoder import reshape_logits
from asyncrl.engines.validation import check_sampling, check_weights
from asyncrl.errors import ConfigError, WeightsError
from asyncrl.messages import SamplingParams, WeightVersion
from asyncrl.tensors import weight_files
from asyncrl.tensors.model_tensors import trained_shapes

LOGITS = torch.log(torch.tensor([0.4, 0.3, 0.2, 0.1]))


def probabilities(tokens: list[int] | None = None, **options: float) -> list[float]:
    sampling = SamplingParams(max_new_tokens=8, is_trained=False, **options)  # type: ignore[arg-type]
    logits = reshape_logits(LOGITS, sampling, tokens or [], ends={0})
    found: list[float] = torch.softmax(logits / (sampling.temperature or 1.0), -1).tolist()
    return found


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.4, 0.3, 0.2, 0.1]),
        ({"top_k": 2}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_p": 0.5}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_p": 0.3}, [1, 0, 0, 0]),
        ({"top_p": 0.6, "top_k": 3}, [4 / 7, 3 / 7, 0, 0]),  # top_p counts what top_k takes away
        ({"temperature": 0.0}, [1, 0, 0, 0]),
        ({"min_new_tokens": 1}, [0, 3 / 6, 2 / 6, 1 / 6]),
    ],
)
def test_probabilities_by_hand(options: dict[str, float], expected: list[float]) -> None:
    assert probabilities(**options) == pytest.approx(expected, abs=1e-6)


def test_penalties_take_from_the_logits_of_the_answers_tokens() -> None:
    both = probabilities([1, 1], presence_penalty=1.0, frequency_penalty=0.5)
    assert both[1] / both[0] == pytest.approx(0.3 / 0.4 * math.exp(-2), rel=1e-5)
    repeated = probabilities([1, 1], repetition_penalty=2.0)  # log 0.3 < 0, so the penalty multiplies
    assert repeated[1] / repeated[0] == pytest.approx(0.3**2 / 0.4, rel=1e-5)


@pytest.mark.parametrize("options", [{"repetition_penalty": 1.1}, {"presence_penalty": 0.5}])
def test_what_is_trained_is_never_sampled_from_a_penalised_distribution(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="changes every logit"):
        check_sampling(SamplingParams(max_new_tokens=4, **options))  # type: ignore[arg-type]
    check_sampling(SamplingParams(max_new_tokens=4, is_trained=False, **options))  # type: ignore[arg-type]


def test_weights_of_another_model_than_the_workers_point_to_its_model_path(tmp_path: Path) -> None:
    save_file({"norm": torch.zeros(2)}, tmp_path / "model.safetensors")
    version = WeightVersion(
        incarnation=0, policy_version=3, uri=str(tmp_path), num_bytes=weight_files.num_bytes(tmp_path)
    )
    assert check_weights(version, expected={"norm": (2,)}) == tmp_path
    with pytest.raises(WeightsError, match=r"norm has shape \[2\], the model's is \[4\]; is this worker's model.path "):
        check_weights(version, expected={"norm": (4,)})


def test_layers_that_predict_further_tokens_are_not_waited_for() -> None:
    """DeepSeek-V3's folder has layers 0..60 and an additional layer 61; the learner trains and exports 0..60.

    Qwen3-Next's has them under another name."""
    folder = {"model.layers.1.norm": (2,), "model.layers.2.norm": (2,), "model.layers.21.norm": (2,), "lm_head": (2,)}
    config = {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    assert list(trained_shapes(folder, config)) == ["model.layers.1.norm", "model.layers.21.norm", "lm_head"]
    assert trained_shapes(folder, {"num_hidden_layers": 2}) == folder
    of_qwen = {"model.layers.1.norm": (2,), "mtp.layers.0.norm": (2,), "mtp.fc.weight": (2, 4)}
    assert list(trained_shapes(of_qwen, {"num_hidden_layers": 2})) == ["model.layers.1.norm"]
