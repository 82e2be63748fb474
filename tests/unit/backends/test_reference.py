"""Checkpoints of the reference backend, and the null backend's weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import safetensors.torch

from asyncrl import config
from asyncrl.adapters import registry
from asyncrl.backends.models import AuxiliaryModel
from asyncrl.backends.null import NullBackend
from asyncrl.backends.reference import read_state
from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.policies.batching.packing import sequence_slices
from tests.harness.backends import expected_logprobs, forward, hugging_face, sequences, started, tiny_model
from tests.harness.packing import pack


def test_a_folder_without_an_index_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a checkpoint of the reference backend"):
        read_state(tmp_path)


def test_a_checkpoint_of_another_backend_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "backend.json").write_text('{"format": "torch_dist"}')
    with pytest.raises(CheckpointError, match="the format is 'torch_dist'; resume with the backend that wrote it"):
        read_state(tmp_path)


def test_weights_are_those_of_the_model_before_and_after_a_step(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path)
    run = config.only_overrides([f'model.path="{folder}"', "learner.backend=none"])
    backend = registry.backend(run)
    assert isinstance(backend, NullBackend)
    backend.start()
    packed = pack(sequences(), max_tokens=1000)
    assert backend.step([packed], learning_rate=1.0).metrics == {}
    (checkpoint := tmp_path / "saved").mkdir()
    backend.save(checkpoint)
    backend.restore(checkpoint)
    given = safetensors.torch.load_file(folder / "model.safetensors")
    exported = dict(backend.export().tensors())
    assert exported.keys() == given.keys()
    assert all((exported[name] == tensor).all() for name, tensor in given.items())
    (outputs,) = backend.forward([packed])
    np.testing.assert_array_equal(outputs[0], packed[0].behavior_logprobs)
    backend.close()


def test_a_model_without_weights_is_refused(tmp_path: Path) -> None:
    run = config.only_overrides([f'model.path="{tmp_path}"', "learner.backend=none"])
    with pytest.raises(ConfigError, match="model.path: .* has no .safetensors file"):
        NullBackend.check(run)
    assert NullBackend.num_gpus(run) == 0


def test_exact_logprobs_are_the_policy_s_alone(tmp_path: Path) -> None:
    """run.exact: engines have no teacher, whose attention, here with sinks, is that of transformers."""
    folder = tiny_model(tmp_path / "policy")
    teacher = tiny_model(tmp_path / "teacher", architecture="gpt_oss")
    (packed,) = pack(sequences(), max_tokens=1000)
    with started("reference", folder, exact_ranks=1, auxiliary={"teacher": AuxiliaryModel(path=teacher)}) as backend:
        found = forward(backend, "reference", packed, model="teacher")
    for where in sequence_slices(packed):
        expected = expected_logprobs(hugging_face(teacher), packed.tokens[where])
        np.testing.assert_allclose(found[where], expected, atol=1e-5)
