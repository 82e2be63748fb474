"""How `bin/test` distributes tests among its processes (tests/conftest.py)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest


def test_the_quick_tests_of_a_file_go_to_one_process(request: pytest.FixtureRequest) -> None:
    """Otherwise each process starts its own server, cluster or fork server for the tests of one group."""
    skip_alone()
    assert request.node.nodeid.endswith("@tests/unit/test_groups.py"), (
        "pytest-xdist ignores groups with this pytest; install that of requirements/dev.txt: bin/install sglang-cpu dev"
    )


def test_a_process_that_runs_tests_is_a_fork_of_the_one_that_has_collected() -> None:
    """Otherwise each process imports for twelve seconds. A process run as a script must not import its parent."""
    skip_alone()
    if os.environ.get("OMP_NUM_THREADS") != "1":
        pytest.skip("libraries start threads when they are imported, without which no fork can go on")
    assert b"tests.harness.collected" in Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    assert getattr(sys.modules["__main__"], "__file__", None) is None


def skip_alone() -> None:
    """Skip in a single process. Checked at run time, because collection does not know the processes yet."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        pytest.skip("one process has no tests to share")
