"""Every benchmark imports, without a GPU and without running: a name that moves breaks none in silence."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted((ROOT / "benchmarks").rglob("*.py"))
    if path.name not in ("__init__.py", "__main__.py")
]


@pytest.mark.parametrize("module", MODULES)
def test_it_imports(module: str) -> None:
    if module.endswith("triton_heads"):
        pytest.importorskip("triton")  # comes with torch for GPUs alone
    assert importlib.import_module(module).__doc__


@pytest.mark.parametrize("module", MODULES)
def test_what_its_functions_import_of_ours_is_there(module: str) -> None:
    tree = ast.parse(ROOT.joinpath(*module.split(".")).with_suffix(".py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in ("asyncrl", "benchmarks"):
            source = importlib.import_module(node.module or "")
            for name in node.names:
                assert hasattr(source, name.name) or importlib.util.find_spec(f"{node.module}.{name.name}") is not None
