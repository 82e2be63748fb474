"""Base class of bus adapters. bus/port.py specifies the behaviour of a bus."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Protocol

from asyncrl.bus.port import Bus
from asyncrl.config import RunConfig
from asyncrl.config.adapter import Adapter
from asyncrl.config.run import LauncherSection
from asyncrl.errors import ConfigError


class BusServer(Protocol):
    """The bus server of one run. ``start`` and ``stop`` block: call them before and after the event loop runs.

    The server is killed when the thread that started it ends.
    """

    @property
    def name(self) -> str:
        """Name of the server in messages to users."""
        ...

    @property
    def url(self) -> str: ...

    @property
    def token(self) -> str:
        """Token of the learner and of the run's owner, who may do everything."""
        ...

    def worker_token(self, name: str) -> str:
        """Return the token of one rollout worker, who may write only under its name; "*": one with any name. Blocks."""
        ...

    def server_token(self, name: str) -> str:
        """Return the token of the server of a frozen model, which may write only under its name. Blocks."""
        ...

    @property
    def pid(self) -> int:
        """Process id; 0 while the server is not running."""
        ...

    def start(self) -> None:
        """Start the server, or restart it at the same address. Raises ConfigError or BusError with the reason."""
        ...

    def stop(self) -> None:
        """Stop the server and keep its store."""
        ...

    def has_room(self) -> bool:
        """Whether the disk of the server's store has room for a few messages. Blocks."""
        ...

    def failure(self) -> str:
        """Why the server will store nothing more, or not everything, until it is restarted; "" if no failure is known.

        Blocks.
        """
        ...


class BusAdapter(Adapter):
    """Defaults for a bus whose server already runs at bus.url."""

    section: ClassVar[str] = "bus"

    is_shared: ClassVar[bool] = True
    """Whether other processes can reach the bus. If not, `asyncrl run` is one process with learner and workers."""

    @classmethod
    def check(cls, run: RunConfig) -> None:
        cls.options(run)
        if not cls.is_shared:
            _check_one_process(run)

    @classmethod
    async def connect(cls, run: RunConfig, *, url: str, token: str, role: str, worker: str = "") -> Bus:
        """Connect to the run's bus at ``url``. Raises ConfigError.

        role    learner, rollout-worker, observer or operator (bus/jetstream/credentials.py); only a learner creates the
                run's topics
        worker  name of a rollout worker, with which every key that it writes begins
        """
        raise NotImplementedError

    @classmethod
    def server(cls, run: RunConfig, *, directory: Path, host: str) -> BusServer | None:
        """Return the server that `asyncrl run` starts for a run without bus.url; None if the bus needs no server.

        directory  folder of the server's store
        host       address of this machine as other machines of the run see it
        """
        return None

    @classmethod
    def stored(cls, run: RunConfig, *, directory: Path) -> BusServer | None:
        """Return a server for the store that a finished run left in ``directory``; None if there is no store."""
        return None


def _check_one_process(run: RunConfig) -> None:
    """Raise ConfigError for settings that need separate processes."""
    because = f'with bus.kind = "{run.bus.kind}" a run is one process'
    if run.bus.url:
        raise ConfigError(f"bus.url: {because} and connects to no address; remove the key, or bus.kind")
    if run.launcher != LauncherSection():
        raise ConfigError(f"launcher: {because} and launches nothing; remove the section")
    for section, gpus in (("learner", run.learner.gpus), ("rollout", run.rollout.gpus)):
        if gpus:
            raise ConfigError(f"{section}.gpus: {because}, which sees every GPU; remove the key")
    if run.rollout.most_workers > run.rollout.workers:
        raise ConfigError(f"rollout.most_workers: {because} and starts no other worker; remove the key")
    if not run.rollout.workers:
        raise ConfigError(f"rollout.workers: {because} and no other worker can join; use 1 or more")
