"""How an adapter describes itself: its options, its checks of the run file, its requirements, and how it is built.

A key of the run file names an adapter's class, either by a name in a table or as "package.module:Class". The class
derives from its port's adapter class, which has defaults for all methods and declares the arguments of ``build``:

    engine.kind      EngineAdapter    engines/adapter.py
    learner.backend  BackendAdapter   backends/adapter.py
    weights.channel  ChannelAdapter   weights/adapter.py
    launcher.kind    LauncherAdapter  launch/launchers/adapter.py
    bus.kind         BusAdapter       bus/adapter.py

No other file tests for an adapter's name. Rewards and rollout functions are plain functions, or classes in a module
that may define ``Options`` (rewards/load.py, environments/load.py).
"""

from __future__ import annotations

from typing import Any, ClassVar

from asyncrl.config import RunConfig, tables
from asyncrl.config.layout import Layout
from asyncrl.errors import ConfigError

__all__ = ["Adapter", "Layout", "RunConfig"]  # the last two are re-exported for adapters


class Adapter:
    """Base of all adapters. Every method may raise ConfigError: one line that says what to change."""

    section: ClassVar[str]
    """Section of the run file that names the adapter and contains its options."""

    options_type: ClassVar[type[Any] | None] = None
    """Dataclass of the adapter's options (``Options`` in the class's module); None if it takes no options."""

    @classmethod
    def options(cls, run: RunConfig) -> Any:
        """Return the section's options as an ``options_type``; None if there is no ``options_type``."""
        table, where = getattr(run, cls.section).options, f"{cls.section}.options"
        if cls.options_type is not None:
            return tables.build(cls.options_type, table, where)
        if table:
            raise ConfigError(f"{where}: {cls.__name__} takes no options")
        return None

    @classmethod
    def check(cls, run: RunConfig) -> None:
        """Refuse a configuration that would fail at startup, as far as the run file and the files it names show."""
        cls.options(run)

    @classmethod
    def check_machine(cls, run: RunConfig) -> None:
        """Refuse a configuration that would fail at startup on this machine: a missing package or GPU."""

    @classmethod
    def num_gpus(cls, run: RunConfig) -> int:
        """Return the number of GPUs that the process takes on a machine with GPUs; 0 if it runs on the CPU."""
        return 0
