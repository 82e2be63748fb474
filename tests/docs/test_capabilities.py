"""Every capability names a test that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROWS = re.findall(r"^\| (.+?) \| (tests/\S+) \|$", (ROOT / "docs" / "capabilities.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("test", [test for _, test in ROWS])
def test_a_capability_has_its_test(test: str) -> None:
    path, _, name = test.partition("::")
    assert (ROOT / path).exists()
    if name:
        functions = {node.name for node in ast.walk(ast.parse((ROOT / path).read_text())) if hasattr(node, "name")}
        assert name.rpartition("::")[2] in functions
