"""Rotary embeddings that SGLang computes in another way than the learner."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from asyncrl.backends import huggingface
from asyncrl.engines.sglang.checks import check_rope
from asyncrl.errors import ConfigError
from tests.harness.backends import tiny_model

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
LINEAR = {"rope_type": "linear", "factor": 8.0}


def folder_of(path: Path, **changes: Any) -> Path:
    config = {"architectures": ["Qwen3ForCausalLM"]} | changes
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_factor": 0.878}, "attn_factor = 0.878, which SGLang uses and the learner ignores; replace it"),
        ({"extrapolation_factor": 0.5}, "extrapolation_factor = 0.5, which SGLang uses and the learner ignores"),
        ({"attention_factor": 1.0}, "attention_factor = 1.0, which the learner uses and SGLang ignores; replace it"),
    ],
)
def test_a_scale_of_yarn_that_only_one_of_them_reads_is_refused(
    tmp_path: Path, key: str, changes: dict[str, float], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        check_rope(folder_of(tmp_path, **{key: YARN | changes}))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("changes", [{}, {"mscale": 1.0, "mscale_all_dim": 1.0}, {"mscale": 0.7, "mscale_all_dim": 2}])
def test_the_scale_that_both_compute_may_be_written_out(tmp_path: Path, changes: dict[str, float]) -> None:
    """Olmo 3's config.json does so. The learner's scale is the one that transformers computes."""
    folder = tiny_model(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    folder_of(folder, **config | {"rope_parameters": YARN | changes})
    scale = huggingface.read_shape(folder).rope_scale
    check_rope(folder)
    for factor, is_same in ((scale, True), (scale * 1.01, False)):
        folder_of(folder, **config | {"rope_parameters": YARN | changes | {"attention_factor": factor}})
        assert math.isclose(huggingface.read_shape(folder).rope_scale, factor)
        if is_same:
            check_rope(folder)
        else:
            with pytest.raises(ConfigError, match="attention_factor"):
                check_rope(folder)


def test_linear_rope_is_refused_for_gemma_3_alone(tmp_path: Path) -> None:
    default = {"rope_type": "default", "rope_theta": 1e4}
    gemma = {"architectures": ["Gemma3ForCausalLM"]}
    for rope_of in (
        {"rope_scaling": LINEAR},
        {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": default}},
    ):
        with pytest.raises(
            ConfigError, match=r"type 'linear' with factor = 8.0, .* ignores for Gemma 3; .* \"inprocess"
        ):
            check_rope(folder_of(tmp_path, **gemma, **rope_of))
    check_rope(folder_of(tmp_path, **gemma, rope_parameters={"full_attention": default, "sliding_attention": default}))
    check_rope(folder_of(tmp_path, **gemma, rope_scaling=None))
    check_rope(folder_of(tmp_path, rope_scaling=LINEAR))
    check_rope(tmp_path / "none")
