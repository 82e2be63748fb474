"""Checks that all engines share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from asyncrl.engines.validation import check_weights
from asyncrl.errors import WeightsError
from asyncrl.messages import WeightVersion
from asyncrl.tensors import weight_files
from asyncrl.tensors.model_tensors import trained_shapes


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
