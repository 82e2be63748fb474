"""How `bin/test` shares tests among its processes (tests/conftest.py)."""

from __future__ import annotations

import os

import pytest


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="one process has no tests to share")
def test_the_quick_tests_of_a_file_go_to_one_process(request: pytest.FixtureRequest) -> None:
    """Else each process starts a server, a cluster or a fork server of its own for the tests of one group."""
    assert request.node.nodeid.endswith("@tests/unit/test_groups.py"), (
        "pytest-xdist ignores groups with this pytest; install that of requirements/dev.txt: bin/install sglang-cpu dev"
    )
