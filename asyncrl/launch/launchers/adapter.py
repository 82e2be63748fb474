"""Base class and table of launchers. Derive from LauncherAdapter to write one; launch/port.py says what it must do."""

from __future__ import annotations

from typing import Any, ClassVar, Final, cast

from asyncrl.adapters.registry import load_adapter
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


LAUNCHERS: Final = {
    "local": "asyncrl.launch.launchers.local:LocalLauncher",
    "ray": "asyncrl.launch.launchers.ray:RayLauncher",
}


def launcher_class(run: RunConfig) -> type[LauncherAdapter]:
    return load_adapter(run.launcher.kind, where="launcher.kind", table=LAUNCHERS, port=LauncherAdapter)
