"""Additional adapters for the contract suites: one named by the user, and a toy of each kind.

    ASYNCRL_CONTRACT_ENGINE=my_package.my_engine:MyEngine pytest tests/contracts/test_engine.py

ASYNCRL_CONTRACT_BACKEND, _CHANNEL, _LAUNCHER and _BUS work the same way. Each adapter is built from a run file that
names only its address.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

from asyncrl import config
from asyncrl.bus.port import Bus
from asyncrl.config import RunConfig, plugins
from asyncrl.config.staleness import StalenessSection

_TOYS: Final = "tests.integration.extending"
TOYS: Final = {
    "engine": f"{_TOYS}.toy_engine:LateEngine",
    "backend": f"{_TOYS}.toy_backend:LimitedBackend",
    "channel": f"{_TOYS}.toy_channel:NotedChannel",
    "launcher": f"{_TOYS}.toy_launcher:EnvironmentLauncher",
    "bus": f"{_TOYS}.toy_bus:CountingBusAdapter",
}


def extra(port: str) -> list[str]:
    """Return addresses of the adapters to add to a suite's own. Toys are for nightly runs (tests/nightly.txt)."""
    mine = os.environ.get(f"ASYNCRL_CONTRACT_{port.upper()}")
    return [*([TOYS[port]] if os.environ.get("ASYNCRL_EXPLORE") else []), *([mine] if mine else [])]


def is_extra(name: str) -> bool:
    return ":" in name


def load(name: str) -> Any:
    """Return the adapter's class."""
    return plugins.load(name, where="the contract's adapter")


def run_of(*, model: Path = Path(), directory: Path = Path(), **sections: Any) -> RunConfig:
    """Return a run file with these sections; all others have no effect."""
    return RunConfig(
        model=config.ModelSection(path=str(model)),
        data=config.DataSection(path=""),
        run=config.RunSection(directory=str(directory)),
        **sections,
    )


async def open_bus(name: str, *, max_prompts: int, **sizes: Any) -> Bus:
    """Open a bus with a window of max_prompts groups and these sizes, keys of [bus]."""
    run = run_of(
        bus=config.BusSection(kind=name, **sizes),
        learner=config.LearnerSection(groups_per_batch=1),
        staleness=StalenessSection(max_staleness=max_prompts - 1),
    )
    bus: Bus = await load(name).connect(run, url=run.bus.url, token=run.bus.token, role="learner")
    return bus
