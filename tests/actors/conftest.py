"""A whole loop of fakes on each bus."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness.fakes import Loop


@pytest.fixture
def loop(bus: Any, tmp_path: Path) -> Loop:
    return Loop(bus, tmp_path)
