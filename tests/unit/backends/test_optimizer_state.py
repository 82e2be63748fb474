"""The backend's part of a checkpoint: unreadable state is told apart from a wrong setting."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl.backends.optimizer_state import FORMAT, open_state
from asyncrl.errors import CheckpointError, ConfigError


def test_a_checkpoint_of_other_tensor_parallel_ranks_is_a_mistake_of_the_settings(tmp_path: Path) -> None:
    """A learner that ends with exit code 2 is not restarted, because a restart would not help."""
    (tmp_path / "backend.json").write_text(json.dumps({"format": FORMAT, "tensor_parallel": 2, "ranks": 2}))
    with pytest.raises(ConfigError, match="resume with learner.tensor_parallel = 2"), open_state(tmp_path):
        pass


def test_a_folder_without_an_index_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a backend checkpoint"), open_state(tmp_path):
        pass
