"""harness = "verifiers": an unmodified environment of verifiers, in children of a virtual environment that has it.

This also gives access to the tasksets and programs that verifiers wraps (TextArena, OpenEnv, NeMo-Gym, Harbor). A row
names its task of the environment with metadata {"task": N}; asyncrl.data.numbered:Tasks makes such rows.
"""

from __future__ import annotations

import glob
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.config.checks import NonNegative, Positive
from asyncrl.environments.agent.harnesses import environment as variables
from asyncrl.environments.agent.harnesses import python_harness
from asyncrl.environments.agent.harnesses.python_harness import PythonHarness
from asyncrl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    environment: str
    """Name of an installed environment (verifiers 0.2), or id of a taskset (0.4)."""
    venv: str
    """Virtual environment with verifiers and the environment; its packages may conflict with the worker's."""
    arguments: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Arguments of load_environment (0.2), or the environment's settings except its taskset's id (0.4)."""
    processes: Positive[int] = 4
    """Number of child processes per rollout worker."""
    directory: str = ""
    """Working directory of the children, from which they also import; empty: the worker's."""
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Additional environment variables of the children."""
    inherit: tuple[str, ...] = ()
    """Environment variables to pass on from the worker, besides PATH, HOME and the like."""
    memory_mib: NonNegative[int] = 4096
    """Memory limit of a child, as for a Python harness."""

    def __post_init__(self) -> None:
        if not self.venv:
            raise ConfigError("venv: name the virtual environment that has verifiers")
        variables.check_venv(self.venv)
        found = glob.glob(str(Path(self.venv) / "lib" / "python*" / "site-packages" / "verifiers" / "__init__.py"))
        if not found:
            raise ConfigError(f"venv: {self.venv} has no verifiers; install it there: bin/pip install verifiers")
        self.python_options()

    def python_options(self) -> python_harness.Options:
        return python_harness.Options(
            processes=self.processes,
            venv=self.venv,
            directory=self.directory,
            environment=self.variables,
            inherit=self.inherit,
            memory_mib=self.memory_mib,
            options={"environment": self.environment, "arguments": dict(self.arguments)},
        )


class VerifiersHarness(PythonHarness):
    def __init__(self, options: Options) -> None:
        path = Path(__file__).with_name("verifiers_child.py")
        super().__init__(f"{path}:Harness", options.python_options(), name="verifiers")
