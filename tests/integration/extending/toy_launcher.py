"""A custom launcher: local processes, with variables of the run file in their environment."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.launch.launchers.local import LocalLauncher, LocalProcess
from asyncrl.launch.port import ProcessSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    environment: Mapping[str, str] = field(default_factory=dict)


class EnvironmentLauncher(LocalLauncher):
    """launcher.kind = "tests.integration.extending.toy_launcher:EnvironmentLauncher" """

    options_type = Options

    def __init__(self, *, run_name: str, log_directory: Path, options: Options) -> None:
        super().__init__(run_name=run_name, log_directory=log_directory)
        self._environment = options.environment

    async def start(self, spec: ProcessSpec) -> LocalProcess:
        return await super().start(dataclasses.replace(spec, environment={**self._environment, **spec.environment}))
