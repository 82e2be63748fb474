"""learner.backend = "none": rollouts only. Steps change nothing, and scores are the behavior logprobs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import safetensors.torch

from asyncrl import config
from asyncrl.adapters import registry
from asyncrl.backends.null import NullBackend
from asyncrl.errors import ConfigError
from tests.harness.backends import documents, tiny_model
from tests.harness.packing import pack


def test_weights_are_those_of_the_model_before_and_after_a_step(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path)
    run = config.only_overrides([f'model.path="{folder}"', "learner.backend=none"])
    backend = registry.backend(run)
    assert isinstance(backend, NullBackend)
    backend.start()
    packed = pack(documents(), max_tokens=1000)
    assert backend.step([packed], learning_rate=1.0).metrics == {}
    (checkpoint := tmp_path / "saved").mkdir()
    backend.save(checkpoint)
    backend.restore(checkpoint)
    given = safetensors.torch.load_file(folder / "model.safetensors")
    exported = dict(backend.export().tensors())
    assert exported.keys() == given.keys()
    assert all((exported[name] == tensor).all() for name, tensor in given.items())
    (scores,) = backend.score([packed])
    np.testing.assert_array_equal(scores[0], packed[0].behavior_logprobs)
    backend.close()


def test_a_model_without_weights_is_refused(tmp_path: Path) -> None:
    run = config.only_overrides([f'model.path="{tmp_path}"', "learner.backend=none"])
    with pytest.raises(ConfigError, match="model.path: .* has no .safetensors file"):
        NullBackend.check(run)
    assert NullBackend.num_gpus(run) == 0
