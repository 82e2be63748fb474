"""What a child process imports: all that its parent can."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from asyncrl import os_process


def test_a_child_imports_from_the_scripts_folder_before_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "inherited")
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(tmp_path / "gone"), "inherited", *sys.path])
    assert os_process.import_path()[0] == str(tmp_path)
    assert not {"inherited", str(tmp_path / "gone"), os.__file__.rpartition("/")[0]} & set(os_process.import_path())
    child = os_process.environment_of_child({"A": "b", "PYTHONPATH": str(tmp_path)})
    assert (child["A"], child["PYTHONPATH"]) == ("b", f"{tmp_path}{os.pathsep}inherited")
    assert os_process.environment_of_child({})["PYTHONPATH"] == "inherited"
    monkeypatch.delenv("PYTHONPATH")
    assert "PYTHONPATH" not in os_process.environment_of_child({})
