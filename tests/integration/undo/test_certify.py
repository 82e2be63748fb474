"""`asyncrl certify` of a real run, and of one that somebody changed."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import RunConfig
from tests.harness.command import asyncrl
from tests.integration.undo.runs import HERE


@pytest.mark.slow
def test_a_certificate_names_everything_that_a_version_was_made_from_and_can_be_computed_again(
    graded_wrong: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, key = tmp_path / "certificate.json", tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "me", "-f", key], check=True)
    code, said, err = asyncrl(
        "certify", graded_wrong.run_directory, "--version", "5", "--out", out, "--sign", key, capsys=capsys
    )
    assert code == 0, err
    assert "version 5, 20 trained groups" in said
    found = json.loads(out.read_text())
    assert [step["step"] for step in found["steps"]] == [1, 2, 3, 4, 5]
    assert {one["group"] for step in found["steps"] for one in step["groups"]} == set(range(20))
    assert {one["worker"] for step in found["steps"] for one in step["groups"]} == {"w0"}
    assert all(one["age"] <= step["bound"] for step in found["steps"] for one in step["groups"])
    assert all(one["age"] <= step["max_staleness"] for step in found["steps"] for one in step["groups"])
    assert [one["incarnation"] for one in found["incarnations"]] == [0, 1]
    newest = found["incarnations"][-1]
    assert newest["settings"]["reward"]["kind"] == f"{HERE}:wrong"
    assert any(path.endswith("rewards.py") for path in newest["files"]["reward.kind"])
    assert newest["files"]["packages"]["torch"] and list(newest["data"].values())
    assert "model.safetensors" in found["weights"]["model"] and found["parent"] is None
    signers = tmp_path / "signers"
    signers.write_text(f"me@here {key.with_suffix('.pub').read_text()}")
    code, said, err = asyncrl("certify", "--check", out, "--signers", signers, capsys=capsys)
    assert (code, said) == (0, f"signed by me@here\n{out}: version 5 is as certified\n"), err


@pytest.mark.slow
def test_a_file_or_a_run_that_somebody_changed_is_found(
    graded_wrong: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy, out = tmp_path / "run", tmp_path / "certificate.json"
    shutil.copytree(graded_wrong.run_directory, copy)
    code, _, err = asyncrl("certify", copy, "--out", out, capsys=capsys)
    assert code == 0, err

    def check(*arguments: Any) -> tuple[int, list[str]]:
        code, said, err = asyncrl("certify", *arguments, "--check", out, capsys=capsys)
        assert code in (0, 1), err
        return code, said.splitlines()

    written = out.read_text()
    changed = json.loads(written)
    changed["steps"][2]["groups"][1]["rewards"][0] += 1
    out.write_text(json.dumps(changed))
    code, lines = check()
    assert code == 1
    assert lines[0] == "DIFFERENT: sha256: the file is not as it was written"
    assert lines[1].startswith("DIFFERENT: step 3: group ") and lines[1].endswith("differs (rewards)")
    out.write_text(written)
    weights = next(copy.glob("weights/*-6/model.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert check() == (1, ["DIFFERENT: weights: the model differs"])
    shutil.rmtree(weights.parent)
    code, lines = check()
    assert (code, lines[0]) == (0, "not checked: the model of this version, which is no longer there")
    shutil.rmtree(copy / "checkpoints")
    code, _, err = asyncrl("certify", copy, "--check", out, capsys=capsys)
    assert code == 2 and "weights.keep, weights.models_every, and checkpoint.keep" in err
    code, _, err = asyncrl("certify", copy, "--version", "7", capsys=capsys)
    assert (code, err.count("\n")) == (2, 1) and "has made versions 1 to 6" in err
    code, _, err = asyncrl("certify", graded_wrong.run_directory, "--check", tmp_path / "none", capsys=capsys)
    assert (code, err.count("\n")) == (2, 1) and "cannot be read" in err
