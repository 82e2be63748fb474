"""INT4 layers of a real SGLang model, updated as in a running server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.data.tiny_model import make_tiny_model
from asyncrl.engines.sglang.server import server_environment
from asyncrl.tensors.quantized_model import model_folder

ROOT = Path(__file__).parents[3]
PROGRAM = Path(__file__).with_name("repacked_model.py")


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_update_gives_the_parameters_of_a_start_from_the_same_folder_at_the_old_addresses(tmp_path: Path) -> None:
    folders = []
    for seed in (0, 1):
        model = make_tiny_model(tmp_path / f"model-{seed}", seed=seed, hidden_size=128)
        folders.append(model_folder(model, tmp_path / f"int4-{seed}", "int4"))
    environment = server_environment(os.environ, device="cpu")
    environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{environment['PYTHONPATH']}"
    ran = subprocess.run(
        [sys.executable, str(PROGRAM), *map(str, folders)], env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    told = json.loads(ran.stdout.splitlines()[-1])
    assert told["own_error"]  # once SGLang can load such layers twice, repacking.py can go
    assert len(told["before"]) > told["parameters"] / 5
    assert (told["after"], told["moved"]) == ([], [])
