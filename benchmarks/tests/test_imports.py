"""Every benchmark can be imported without a GPU, so that a renamed module does not break one silently."""

from __future__ import annotations

import ast
import importlib.util

import pytest

from tests import ROOT

MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted((ROOT / "benchmarks").rglob("*.py"))
    if path.name not in ("__init__.py", "__main__.py") and path.parent.name != "tests"
]


@pytest.mark.parametrize("module", MODULES)
def test_it_imports(module: str) -> None:
    assert importlib.import_module(module).__doc__


@pytest.mark.parametrize("module", MODULES)
def test_what_its_functions_import_of_ours_is_there(module: str) -> None:
    tree = ast.parse(ROOT.joinpath(*module.split(".")).with_suffix(".py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in (
            "asyncrl",
            "benchmarks",
            "tests",
        ):
            source = importlib.import_module(node.module or "")
            for name in node.names:
                assert hasattr(source, name.name) or importlib.util.find_spec(f"{node.module}.{name.name}") is not None
