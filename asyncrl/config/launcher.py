"""[launcher] of the run file: how and where the processes of the run are started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherSection:
    kind: str = "local"
    """Starts the processes of the run: a name, or "package.module:Class"."""
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)  # may hold secrets
    """Options of the launcher."""
