"""How a launcher describes itself. Derive from LauncherAdapter to write one; what it must do is in
protocols/launcher.py.
"""

from __future__ import annotations

from typing import Any, ClassVar, cast

from asyncrl.protocols.adapter import Adapter, RunConfig
from asyncrl.protocols.launcher import Launcher


class LauncherAdapter(Adapter):
    section: ClassVar[str] = "launcher"

    places: ClassVar[bool] = False
    """Whether it finds machines and GPUs itself; if not, asyncrl deals the GPUs of this machine (placement.py)."""

    @classmethod
    def build(cls, run: RunConfig) -> Launcher:
        """The launcher, not connected."""
        return cast(Any, cls)(  # type: ignore[no-any-return]
            run_name=run.run.name, log_directory=run.run_directory / "logs", options=cls.options(run)
        )
