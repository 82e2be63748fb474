"""How an adapter describes itself: its options, what it refuses, what it needs, and how it is built.

An adapter is a class named by a key of the run file, either by a name in run/registry.py or as "package.module:Class".
It derives from its port's adapter class, which has defaults for all of this and declares the arguments of ``build``:

    engine.kind      EngineAdapter    engines/adapter.py
    learner.backend  BackendAdapter   backends/adapter.py
    weights.channel  ChannelAdapter   weights/adapter.py
    launcher.kind    LauncherAdapter  launchers/adapter.py
    bus.kind         BusAdapter       bus/adapter.py

No other file tests for an adapter's name. Rewards and rollout functions are plain functions, or classes whose module
has an ``Options`` (rewards/load.py, rollouts/load.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from asyncrl.config import RunConfig, tables
from asyncrl.config.layout import Layout
from asyncrl.errors import ConfigError

__all__ = ["Adapter", "Layout", "RunConfig"]  # the last two are re-exported for adapters


class Adapter:
    """Every method may raise ConfigError: one line that says what to change."""

    section: ClassVar[str]
    """Section of the run file that names the adapter and holds its options."""

    options_type: ClassVar[type[Any] | None] = None
    """The dataclass of its options, ``Options`` beside the class; None if it takes none."""

    @classmethod
    def options(cls, run: RunConfig) -> Any:
        """The section's options as an ``options_type``, None without one."""
        table, where = getattr(run, cls.section).options, f"{cls.section}.options"
        if cls.options_type is not None:
            return tables.build(cls.options_type, table, where)
        if table:
            raise ConfigError(f"{where}: {cls.__name__} takes no options")
        return None

    @classmethod
    def check(cls, run: RunConfig) -> None:
        """Refuse what would fail at startup, as far as the run file and the files it names show."""
        cls.options(run)

    @classmethod
    def check_joined(cls, options: Mapping[str, Any]) -> None:
        """Refuse options that came over the bus to a machine that joins and could do more there than set a size or a
        method: name a file, a command, code. Its owner says those."""

    @classmethod
    def check_machine(cls, run: RunConfig) -> None:
        """Refuse what would fail at startup on this machine: a missing package, a missing GPU."""

    @classmethod
    def num_gpus(cls, run: RunConfig) -> int:
        """GPUs that its process takes on a machine with GPUs; 0 if it runs on the CPU."""
        return 0

    @classmethod
    def required_paths(cls, run: RunConfig) -> Mapping[str, Path]:
        """Key of the run file -> file or folder that must exist on the machine of each process with this adapter."""
        return {}
