"""Adapters that a contract suite runs over besides asyncrl's own: a toy of each kind, and one of yours.

    ASYNCRL_CONTRACT_ENGINE=my_package.my_engine:MyEngine pytest tests/contracts/test_engine.py

Likewise ASYNCRL_CONTRACT_BACKEND, _CHANNEL, _LAUNCHER and _BUS. Each is built from a run file, by its address alone.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

from asyncrl import config
from asyncrl.config import RunConfig, plugins
from asyncrl.config.staleness import StalenessSection
from asyncrl.messages.signing import UNSIGNED, Signatures
from asyncrl.protocols import Bus

_TOYS: Final = "tests.integration.extending"
TOYS: Final = {
    "engine": f"{_TOYS}.toy_engine:LateEngine",
    "backend": f"{_TOYS}.toy_backend:LimitedBackend",
    "channel": f"{_TOYS}.toy_channel:NotedChannel",
    "launcher": f"{_TOYS}.toy_launcher:EnvironmentLauncher",
    "bus": f"{_TOYS}.toy_bus:CountingBusAdapter",
}


def extra(port: str) -> list[str]:
    """Addresses of the adapters to add to a suite's own."""
    mine = os.environ.get(f"ASYNCRL_CONTRACT_{port.upper()}")
    return [TOYS[port], *([mine] if mine else [])]


def is_extra(name: str) -> bool:
    return ":" in name


def load(name: str) -> Any:
    """The adapter's class."""
    return plugins.load(name, where="the contract's adapter")


def run_of(*, model: Path = Path(), directory: Path = Path(), **sections: Any) -> RunConfig:
    """A run file with these sections and no other that matters."""
    return RunConfig(
        model=config.ModelSection(path=str(model)),
        data=config.DataSection(path=""),
        run=config.RunSection(directory=str(directory)),
        **sections,
    )


async def open_bus(name: str, *, max_prompts: int, signatures: Signatures = UNSIGNED, **sizes: Any) -> Bus:
    """A bus with this window (max_prompts groups) and these sizes, keys of [bus]."""
    run = run_of(
        bus=config.BusSection(kind=name, **sizes),
        learner=config.LearnerSection(groups_per_batch=1),
        staleness=StalenessSection(max_staleness=max_prompts - 1),
    )
    bus: Bus = await load(name).connect(
        run, url=run.bus.url, token=run.bus.token, role="learner", signatures=signatures
    )
    return bus
