"""Tests: unit (mirrors asyncrl/), contracts, actors, integration, chaos, oracles, docs; what they share is in
harness."""

from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
"""The repository."""
