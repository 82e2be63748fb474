"""The launcher that a run file names."""

from __future__ import annotations

from typing import Final

from asyncrl.adapters.registry import load_adapter
from asyncrl.config import RunConfig
from asyncrl.launch.launchers.adapter import LauncherAdapter
from asyncrl.launch.port import Launcher

LAUNCHERS: Final = {
    "local": "asyncrl.launch.launchers.local:LocalLauncher",
    "ray": "asyncrl.launch.launchers.ray:RayLauncher",
}


def launcher_class(run: RunConfig) -> type[LauncherAdapter]:
    return load_adapter(run.launcher.kind, where="launcher.kind", table=LAUNCHERS, port=LauncherAdapter)


def build_launcher(run: RunConfig) -> Launcher:
    return launcher_class(run).build(run)
