"""Base class of buses; protocols/bus.py specifies what they must do."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Protocol

from asyncrl.config import RunConfig
from asyncrl.config.launcher import LauncherSection
from asyncrl.errors import ConfigError
from asyncrl.messages.signing import Signatures
from asyncrl.protocols import Bus
from asyncrl.protocols.adapter import Adapter


class BusServer(Protocol):
    """A server of one run. ``start`` and ``stop`` block briefly: call them before and after the event loop runs.

    It is killed when the thread that started it ends.
    """

    @property
    def name(self) -> str:
        """Its name in messages to users."""
        ...

    @property
    def url(self) -> str: ...

    @property
    def token(self) -> str:
        """Token that clients must present."""
        ...

    @property
    def pid(self) -> int:
        """0 while it is not running."""
        ...

    def start(self) -> None:
        """Start it, or restart it at the same address. Raises ConfigError or BusError with the reason."""
        ...

    def stop(self) -> None:
        """Stop it; its store remains."""
        ...

    def has_room(self) -> bool:
        """Whether its store's disk has room for a few messages. Blocks."""
        ...

    def failure(self) -> str:
        """Why it will store nothing more, or not everything, until it is restarted; "" as far as it knows. Blocks."""
        ...


class BusAdapter(Adapter):
    """Defaults for a bus whose server is already running at bus.url."""

    section: ClassVar[str] = "bus"

    is_shared: ClassVar[bool] = True
    """Whether other processes can reach it. If not, `asyncrl run` runs the learner and its workers in one process."""

    @classmethod
    def check(cls, run: RunConfig) -> None:
        cls.options(run)
        if not cls.is_shared:
            _check_one_process(run)

    @classmethod
    async def connect(cls, run: RunConfig, *, url: str, token: str, role: str, signatures: Signatures) -> Bus:
        """The run's bus at ``url``. Raises ConfigError.

        role  learner, rollout-worker, observer or operator (bus/jetstream/credentials.py); only a learner creates the
              run's topics
        signatures  what every message is sealed with and opened by (bus/encoding.py)
        """
        raise NotImplementedError

    @classmethod
    def server(cls, run: RunConfig, *, directory: Path, host: str) -> BusServer | None:
        """The server that `asyncrl run` starts for a run without bus.url; None if the bus has none to start.

        directory  for its store
        host       this machine's address, as the run's other machines see it
        """
        return None

    @classmethod
    def stored(cls, run: RunConfig, *, directory: Path) -> BusServer | None:
        """A server on the store that a finished run left in ``directory``; None if there is none."""
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
