"""Base class of launchers. Derive from LauncherAdapter to write one; launch/port.py specifies its behaviour."""

from __future__ import annotations

from typing import Any, ClassVar, cast

from asyncrl.config.adapter import Adapter, RunConfig
from asyncrl.launch.port import Launcher


class LauncherAdapter(Adapter):
    section: ClassVar[str] = "launcher"

    places: ClassVar[bool] = False
    """Whether the launcher finds machines and GPUs. If not, asyncrl assigns the GPUs of this machine (placement.py)."""

    @classmethod
    def build(cls, run: RunConfig) -> Launcher:
        """Build the launcher without connecting it."""
        return cast(Any, cls)(  # type: ignore[no-any-return]
            run_name=run.run.name, log_directory=run.run_directory / "logs", options=cls.options(run)
        )
