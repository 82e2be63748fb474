"""The reference backend's part of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.backends.reference import read_state
from asyncrl.errors import CheckpointError


def test_a_folder_without_an_index_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a checkpoint of the reference backend"):
        read_state(tmp_path)


def test_a_checkpoint_of_another_backend_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "backend.json").write_text('{"format": "torch_dist"}')
    with pytest.raises(CheckpointError, match="the format is 'torch_dist'; resume with the backend that wrote it"):
        read_state(tmp_path)
