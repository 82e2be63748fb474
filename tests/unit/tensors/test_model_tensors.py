"""Names and shapes of a folder's tensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from asyncrl.data import model_folder
from asyncrl.tensors.model_tensors import read_shapes


@pytest.mark.parametrize("read", [read_shapes, model_folder._read_shapes])
def test_headers_are_read_once_until_their_file_changes(
    read: Callable[[Path], Mapping[str, Any]], tmp_path: Path
) -> None:
    """`asyncrl check` asks twenty times, and a mixture's headers are of tens of thousands of tensors."""
    names = {"norm": "model-00001-of-00002.safetensors", "head": "model-00002-of-00002.safetensors"}
    for name, file in names.items():
        safetensors.numpy.save_file({name: np.zeros(2, np.float32)}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    first = read(tmp_path)
    assert dict(first) == {"norm": (2,), "head": (2,)}
    assert read(tmp_path) is first
    safetensors.numpy.save_file({"head": np.zeros(3, np.float32)}, tmp_path / names["head"])
    assert dict(read(tmp_path)) == {"norm": (2,), "head": (3,)}
