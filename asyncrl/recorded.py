"""A run as its folder has it: history, settings, checkpoint, metrics, and the bus it left behind.

Nothing here changes the run. The bus is that of a run that is up, or a nats-server started on the run's own store for
as long as somebody reads; it makes no topic that is not there with the same settings, publishes nothing and acks
nothing. The store's lock keeps it and `asyncrl run` apart (bus/server.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import json
import os
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from asyncrl import app, checkpoint, config
from asyncrl.bus.server import EmbeddedServer
from asyncrl.checkpoint import LearnerState
from asyncrl.config import RunConfig
from asyncrl.config import record as config_record
from asyncrl.errors import BusError, ConfigError
from asyncrl.history import HISTORY_FILE, read
from asyncrl.messages import TrajectoryGroup
from asyncrl.policies.accounting import BEGUN, Entry
from asyncrl.protocols import Bus, Record
from asyncrl.topics import TRAJECTORIES

SILENT_SECONDS = 10.0
"""How long the log may take to give its next record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Of a bus that answers."""

    url: str
    token: str


def launcher_pid(directory: Path) -> int:
    """The process of the `asyncrl run` that is up in ``directory``, by what it wrote there; 0 when there is none."""
    try:
        pid = int(json.loads((directory / app.BUS_FILE).read_text())["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0
    return pid if _is_alive(pid) else 0


def run_at(where: Path | None, overrides: list[str], *, verb: str) -> RunConfig:
    """The run in a folder, or of a run file, or named by ``overrides`` alone. Raises ConfigError."""
    if where is None:
        if not overrides:
            raise ConfigError(
                f"{verb}: name a run folder, a run file, or a bus and a run: --set bus.url=nats://HOST:PORT "
                "--set run.name=NAME"
            )
        return config.only_overrides(overrides)
    if not where.exists():
        raise ConfigError(f"{where}: no such run folder or run file")
    if not where.is_dir():
        return config.load(where, overrides)
    here = f"run.directory={json.dumps(str(where.absolute().parent))}"
    return RecordedRun(where).newest_settings([here, *overrides])


class RecordedRun:
    """Raises ConfigError for a folder that holds no run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.history_file = directory / HISTORY_FILE

    def history(self) -> list[Entry]:
        return read(self.history_file)

    def settings(self, life: Entry) -> RunConfig:
        """The run file of one life of the learner."""
        return config_record.from_table(life.settings, where=f"{self.history_file}: epoch {life.run_epoch}")

    def newest_settings(self, overrides: Iterable[str] = ()) -> RunConfig:
        """Those of the last life, with ``section.key=value`` overrides applied."""
        lives = [entry for entry in self.history() if entry.kind == BEGUN]
        if not lives:
            raise ConfigError(f"{self.history_file}: no learner has begun this run")
        table = copy.deepcopy(dict(lives[-1].settings))
        for item in overrides:
            config.override(table, item)
        return config_record.from_table(table, where=f"{self.history_file}: epoch {lives[-1].run_epoch}")

    def checkpoint(self) -> tuple[LearnerState, Path] | None:
        return checkpoint.latest(self.directory / "checkpoints")

    def checkpoint_before(self, step: int, history: Sequence[Entry]) -> tuple[int, Path | None]:
        """(steps done, backend folder) of the newest checkpoint of ``history`` that ``step`` may start from; or 0."""
        for folder in reversed(checkpoint.complete(self.directory / "checkpoints")):
            state, backend = checkpoint.read(folder)
            done = [entry.step for entry in history if entry.kind == "trained" and entry.position < state.history]
            if state.step < step and done and done[-1] == state.step:
                return state.step, backend
        return 0, None

    def metrics(self) -> dict[tuple[int, int], dict[str, Any]]:
        """(run epoch, step) -> row of metrics.jsonl; a line cut short by a kill is left out."""
        rows: dict[tuple[int, int], dict[str, Any]] = {}
        with contextlib.suppress(FileNotFoundError):
            for line in (self.directory / "metrics.jsonl").read_text().splitlines():
                with contextlib.suppress(ValueError):
                    row = json.loads(line)
                    rows[int(row.get("learner/run_epoch", 0)), row["step"]] = row
        return rows

    @contextlib.contextmanager
    def server(self, run: RunConfig, *, token: str) -> Iterator[Address | None]:
        """Where the run's bus answers, while this is open. None when nothing is left of it.

        Call it before the event loop runs. Raises ConfigError when another process has the store.
        """
        if run.bus.url:
            yield Address(url=run.bus.url, token=token)
            return
        if (address := self._address_of_running()) is not None:
            yield address
            return
        store = self.directory / "nats"
        if run.bus.store == "memory" or not (store / "jetstream").is_dir():
            yield None
            return
        with EmbeddedServer(store, max_message_bytes=run.bus.max_message_bytes) as server:
            yield Address(url=server.url, token=server.token)

    def _address_of_running(self) -> Address | None:
        """What `asyncrl run` wrote, None when it ended; killed, it leaves the file behind.

        A nats-server that was killed is on its way back: to start another one on its store would end the run.
        """
        try:
            table = json.loads((self.directory / app.BUS_FILE).read_text())
            found = Address(url=table["url"], token=table["token"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        if _answers(found):
            return found
        if launcher := launcher_pid(self.directory):
            raise ConfigError(
                f"{self.directory}: its run is up (process {launcher}), but no nats-server answers at {found.url}; "
                "it may just be starting again, so try again in a moment"
            )
        return None


def _answers(address: Address) -> bool:
    parts = urlsplit(address.url)
    try:
        with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=2.0):
            return True
    except OSError:
        return False


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is there, and somebody else's
        return True
    return True


@contextlib.asynccontextmanager
async def connected(run: RunConfig, address: Address) -> AsyncIterator[Bus]:
    """The run's bus for who only reads: nothing is made or changed there."""
    bus = await app.observe(
        dataclasses.replace(run, bus=dataclasses.replace(run.bus, url=address.url)), token=address.token
    )
    try:
        yield bus
    finally:
        await bus.close()


async def log_records(bus: Bus) -> AsyncGenerator[Record[TrajectoryGroup], None]:
    """Every record that the trajectory log has now, in order. Close it (``contextlib.aclosing``) to stop early."""
    last = await bus.last_sequence(TRAJECTORIES)
    if not await bus.depth(TRAJECTORIES):
        return
    async with bus.read(TRAJECTORIES) as records:
        sequence = 0
        while sequence < last:
            try:
                async with asyncio.timeout(SILENT_SECONDS):
                    record = await anext(records)
            except TimeoutError:
                if not await bus.depth(TRAJECTORIES):  # a learner trimmed it all meanwhile
                    return
                raise BusError(
                    f"the trajectory log gave nothing for {SILENT_SECONDS:.0f} s behind {sequence}"
                ) from None
            sequence = record.sequence
            yield record
