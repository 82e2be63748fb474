"""A run as recorded by its folder: history, settings, checkpoint, metrics, and the bus that it left behind.

Looking at a folder runs none of its code and sends no secrets: a folder may be a stranger's. So the recorded address of
the bus, its credentials and a bus class count only where the run ran and for its user, or if the user names them
(tests/integration/security/test_foreign_folder.py).

Nothing here changes the run. The bus is that of the running run, or a nats-server that is started on the run's store
while it is read. Readers create and change no topic, publish nothing and ack nothing. The lock of the store prevents
simultaneous use by `asyncrl run` (bus/nats_server/server.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import itertools
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from asyncrl import config
from asyncrl.actors.learner import checkpoint
from asyncrl.actors.learner.history import HISTORY_FILE, read, whole_bytes
from asyncrl.adapters import bus_file, registry
from asyncrl.audit import metric_rows
from asyncrl.bus.port import Bus, Record
from asyncrl.config import RunConfig
from asyncrl.config import record as config_record
from asyncrl.config.toml_text import toml_text
from asyncrl.errors import BusClosed, BusError, CheckpointDamaged, ConfigError, NoHistory, NoSuchRun
from asyncrl.messages.topics import Topic
from asyncrl.os_process import process_space
from asyncrl.policies.audit.entries import BEGUN, HistoryEntry
from asyncrl.policies.groups.saved import LearnerState

log = logging.getLogger("asyncrl.check")

M = TypeVar("M")
T = TypeVar("T")

BEGUN_FILE: Final = "regrade/begun.json"
LINEAGE_FILE: Final = "lineage.json"
"""Of a branch that `asyncrl regrade` writes: what it is written with; and where it comes from, written last."""
SILENT_SECONDS = 10.0
"""Time limit for the next record of a log."""
_LOOK_SECONDS: Final = 0.5


_TRACES: Final = ("checkpoints", "metrics.jsonl", "nats", bus_file.BUS_FILE)
"""Files and folders that a run leaves in its folder besides its history."""


@dataclass(frozen=True, slots=True)
class Address:
    """Address of a bus that answers.  of: the run's folder, if the server is that of its `asyncrl run`"""

    url: str
    token: str
    of: Path | None = None


def newest_model(run: RunConfig) -> Path | None:
    """Return the Hugging Face folder of the newest weights; None if there is none on disk."""
    found = model_folders(run.weights_directory)
    return found[max(found)] if found else None


def model_folders(directory: Path) -> dict[tuple[int, int], Path]:
    """Return the folders INCARNATION-VERSION of a directory by these numbers."""
    found = {}
    for folder in directory.glob("*-*"):
        incarnation, _, version = folder.name.partition("-")
        if incarnation.isdecimal() and version.isdecimal():
            found[int(incarnation), int(version)] = folder
    return found


def run_at(where: Path | None, overrides: list[str], *, verb: str, needs_bus: bool = True) -> RunConfig:
    """Return the settings of the run in a folder, of a run file, or named only by ``overrides``. Raises ConfigError.

    needs_bus: raise NoSuchRun for a folder that was renamed or copied, while its run is not up
    """
    if where is None:
        if not overrides:
            raise ConfigError(
                f"{verb}: name a run folder, a run file, or a bus and a run: --set bus.url=nats://HOST:PORT "
                "--set run.name=NAME"
            )
        return config.only_overrides(overrides)
    if not where.exists():
        raise ConfigError(
            f"{where}: no such run folder or run file; if the run is just starting, try again in a few seconds"
        )
    if not where.is_dir():
        return config.load(where, overrides)
    run = RecordedRun(where).bus_settings(overrides)
    if where.absolute().name == run.run.name or run.bus.url or not registry.bus_class(run).is_shared:
        return run
    try:  # renamed or copied: use the server of this folder, not of the folder with the run's name
        url, token = bus_file.read_address(where)
    except NoSuchRun:
        if needs_bus:
            raise
        return run
    return dataclasses.replace(run, bus=dataclasses.replace(run.bus, address=url, token=token))


class RecordedRun:
    """The records in a run's folder. Raises ConfigError for one with pipes; methods do so for one without a run."""

    def __init__(self, directory: Path) -> None:
        _refuse_devices(directory)
        self.directory = directory
        self.history_file = directory / HISTORY_FILE
        self._has_said = False

    def history(self) -> list[HistoryEntry]:
        """Return all lines. Raises ConfigError for a folder without a run, and for a part of a branch."""
        self.require_whole_branch()
        return read(self.history_file)

    @property
    def history_bytes(self) -> int:
        """Size of the history up to the end of its last complete line; 0 if there is none."""
        return whole_bytes(self.history_file)

    @property
    def is_run(self) -> bool:
        """Whether the folder holds anything of a run. Raises ConfigError if it may not be read."""
        try:
            return any((self.directory / name).exists() for name in (HISTORY_FILE, *_TRACES))
        except OSError as error:
            raise ConfigError(f"{error.filename or self.directory}: cannot be read: {error.strerror}") from None

    def settings(self, begun: HistoryEntry) -> RunConfig:
        """Return the run file of one incarnation of the learner, from the history line that began it."""
        if not begun.settings:
            raise ConfigError(
                f"{self.history_file}: the line that began incarnation {begun.incarnation} is damaged, so its run file "
                "is not known"
            )
        return self._settings(begun)

    def newest_settings(self, overrides: Iterable[str] = ()) -> RunConfig:
        """Return the settings of the last incarnation, with ``section.key=value`` overrides applied."""
        return self._settings(self.last_start(), overrides)

    def _settings(self, begun: HistoryEntry, overrides: Iterable[str] = ()) -> RunConfig:
        table, items = copy.deepcopy(dict(begun.settings)), list(overrides)
        # other users of this machine know its process_space, too
        where = "elsewhere" if begun.host != process_space() else "" if self._is_ours() else "as another user"
        if where:
            self._forget_bus(table, named={item.partition("=")[0] for item in items}, ran=where)
        for item in items:
            config.override(table, item)
        return config_record.from_table(table, where=f"{self.history_file}: incarnation {begun.incarnation}")

    def _is_ours(self) -> bool:
        try:
            return self.history_file.stat().st_uid == os.geteuid()
        except OSError:
            return False

    def _forget_bus(self, table: dict[str, Any], *, named: Collection[str], ran: str) -> None:
        """Keep of the recorded bus only what its store was like, and its credentials if the user names its address."""
        bus = table.get("bus")
        if not isinstance(bus, dict):
            return
        kept = {*config_record.BUS_STORE, *(config_record.BUS_PATHS if "bus.url" in named else ())}
        kept |= {"kind"} if bus.get("kind") in registry.BUSES else set()
        table["bus"] = {key: value for key, value in bus.items() if key in kept}
        forgotten = [f"bus.{key}" for key in bus if key not in kept and bus[key] and f"bus.{key}" not in named]
        if forgotten and not self._has_said:
            self._has_said = True
            log.warning(
                "%s: its learner ran %s, so its recorded %s not used; name what you trust, as in --set "
                "bus.url=nats://HOST:PORT",
                self.directory,
                ran,
                f"{', '.join(forgotten)} {'is' if len(forgotten) == 1 else 'are'}",
            )

    def last_start(self) -> HistoryEntry:
        """Return the history line that began the last incarnation."""
        begun = [entry for entry in self.history() if entry.kind == BEGUN]
        if not begun:
            raise NoHistory(f"{self.history_file}: has no line of a learner that began this run")
        return begun[-1]

    def require_whole_branch(self) -> None:
        """Raise ConfigError for a branch that was begun, and is not written to its end."""
        if (self.directory / BEGUN_FILE).exists() and not (self.directory / LINEAGE_FILE).exists():
            raise ConfigError(
                f"{self.directory}: is a branch that is not written to its end; wait for its `asyncrl regrade` "
                "command, or give it again, or remove the folder"
            )

    def has_trained_all(self) -> bool:
        """Whether the run has trained its last step. False if its settings are not known."""
        try:
            steps = self.newest_settings().run.steps
            return self.history()[-1].step >= steps
        except ConfigError:
            return False

    def bus_settings(self, overrides: Iterable[str] = ()) -> RunConfig:
        """Return the newest settings, for use of the bus and the run's name.

        Without a history, derive them from the folder.
        """
        here = f"run.directory={toml_text(str(self.directory.absolute().parent))}"
        try:
            return self.newest_settings([here, *overrides])
        except NoHistory:
            if not self.is_run:
                raise
            name = f"run.name={toml_text(self.directory.absolute().name)}"
            return config.only_overrides([here, name, *overrides], where=str(self.directory))

    def checkpoint(self, *, say: Callable[[str], None] = lambda line: None) -> tuple[LearnerState, Path] | None:
        """Return the newest checkpoint with a complete learner.json. ``say`` is called with a line for each newer one.

        Raises ConfigError if the folder cannot be read.
        """
        folder = self.directory / "checkpoints"
        try:
            return checkpoint.latest(folder, say=say)
        except OSError as error:
            raise ConfigError(f"{error.filename or folder}: cannot be read: {error.strerror}") from None

    def checkpoint_before(self, step: int, history: Sequence[HistoryEntry]) -> tuple[int, Path | None]:
        """Return (steps done, backend folder) of the newest checkpoint from which ``step`` can start.

        The checkpoint must belong to ``history``. Returns (0, None) if there is none.

        Raises ConfigError if a checkpoint cannot be read.
        """
        for done, folder in self.checkpoints(history):
            if done < step:
                with contextlib.suppress(CheckpointDamaged):
                    return done, _read_checkpoint(folder, whole=True)[1]
        return 0, None

    def checkpoints(self, history: Sequence[HistoryEntry]) -> Iterator[tuple[int, Path]]:
        """Yield (steps done, folder) of every checkpoint that belongs to ``history``, the newest first.

        Of its files only learner.json is checked. Raises ConfigError if it cannot be read.
        """
        for folder in reversed(checkpoint.list_complete(self.directory / "checkpoints")):
            with contextlib.suppress(CheckpointDamaged):
                state, _ = _read_checkpoint(folder)
                done = [entry.step for entry in history if entry.kind == "trained" and entry.position < state.history]
                if done and done[-1] == state.step:
                    yield state.step, folder

    def metrics(self, *, say: Callable[[str], None] = lambda line: None) -> dict[tuple[int, int], dict[str, Any]]:
        """Return (incarnation, step) -> row of metrics.jsonl. ``say`` is called with a line on what cannot be read."""
        path = self.directory / "metrics.jsonl"
        rows: dict[tuple[int, int], dict[str, Any]] = {}
        damaged: list[int] = []
        try:
            *whole, _ = path.read_bytes().split(b"\n")  # the last line may be incomplete
        except FileNotFoundError:
            return {}
        except OSError as error:
            say(f"{path.name} cannot be read: {error.strerror}")
            return {}
        for number, line in enumerate(whole, 1):
            if (row := metric_rows.parse(line)) is None:
                damaged.append(number)
                continue
            key = (int(row.get("learner/incarnation", 0)), row["step"])
            rows[key] = rows.get(key, {}) | row  # an evaluation has a separate row
        if damaged:
            lines = f"line {damaged[0]}" if len(damaged) == 1 else f"lines {damaged[0]} to {damaged[-1]}"
            say(f"{path.name} is damaged: {len(damaged)} of its {len(whole)} rows cannot be read ({lines})")
        return rows

    @contextlib.contextmanager
    def server(self, run: RunConfig, *, token: str) -> Iterator[Address | None]:
        """Yield the address of the run's bus while the context is open; None if nothing is left of the bus.

        Call this before the event loop runs. Raises ConfigError if another process uses the store.
        """
        if run.bus.url:
            yield Address(url=run.bus.url, token=token)
            return
        if (address := self._address_of_running()) is not None:
            yield address
            return
        server = registry.bus_class(run).stored(run, directory=self.directory)
        if server is None:
            yield None
            return
        server.start()
        try:
            yield Address(url=server.url, token=server.token)
        finally:
            server.stop()

    def on_bus(self, run: RunConfig, work: Callable[[Bus], Coroutine[Any, Any, T]], *, token: str) -> T:
        """Do ``work`` with the run's bus, as an observer, and return its result. Blocks; call it without an event loop.

        Raises ConfigError if nothing is left of the bus, or another process uses its store.
        """
        with self.server(run, token=token) as address:
            if address is None:
                raise ConfigError(f"{self.directory}: {self.why_no_log(run)}")

            async def connected() -> T:
                async with connect(run, address) as bus:
                    return await work(bus)

            return asyncio.run(connected())

    def why_no_log(self, run: RunConfig) -> str:
        """Explain why ``server`` yields None: the key of the run file that kept the log in memory, if one did."""
        if not registry.bus_class(run).is_shared:
            return f'bus.kind = "{run.bus.kind}" keeps the log in the run\'s own process; "nats" can be read by others'
        if run.bus.store == "memory":
            return 'bus.store = "memory": its log was in memory and ended with the run; use "file"'
        return "nothing is left of its log: the store of its bus is not there"

    def _address_of_running(self) -> Address | None:
        """Return the address that `asyncrl run` wrote; None after it has ended. A killed one leaves the file behind.

        A nats-server that was killed is being restarted; starting another one on its store would end the run.
        """
        try:
            found = Address(*bus_file.read_address(self.directory), of=self.directory)
        except ConfigError:
            return None
        if bus_file.answers(found.url):
            return found
        if launcher := bus_file.launcher_pid(self.directory):
            raise ConfigError(
                f"{self.directory}: its run is up (process {launcher}), but no nats-server answers at {found.url}; "
                "it may just be starting again, so try again in a moment"
            )
        return None


def _read_checkpoint(folder: Path, *, whole: bool = False) -> tuple[LearnerState, Path]:
    try:
        return checkpoint.read(folder, whole=whole)
    except OSError as error:
        raise ConfigError(f"{error.filename or folder}: cannot be read: {error.strerror}") from None


def _refuse_devices(directory: Path) -> None:
    """Raise ConfigError if a record is a pipe or a device, as a stranger's may be: reading it would never end."""
    with contextlib.suppress(OSError):
        for path in itertools.chain(directory.iterdir(), directory.glob("checkpoints/*/*")):
            if path.exists() and not (path.is_file() or path.is_dir() or path.is_socket()):
                raise ConfigError(f"{path}: is a pipe or a device, which no run has in its folder; remove it")


@contextlib.asynccontextmanager
async def connect(run: RunConfig, address: Address) -> AsyncIterator[Bus]:
    """Connect to the run's bus at this address for reading.

    When its `asyncrl run` ends, the connection is closed: a request would wait for its server for ever. Raises
    NoSuchRun then, instead of BusClosed.
    """
    there = dataclasses.replace(run, bus=dataclasses.replace(run.bus, url=address.url))
    async with observing(there, token=address.token) as bus:
        ending = asyncio.create_task(_close_with_run(bus, address))
        try:
            yield bus
        except BusClosed:
            if address.of is None:
                raise
            raise NoSuchRun(f"{address.of}: the run has ended meanwhile; give the command again") from None
        finally:
            ending.cancel()
            await asyncio.wait((ending,))


async def _close_with_run(bus: Bus, address: Address) -> None:
    """waits for: the end of `asyncrl run`    woken by: the clock"""
    if address.of is None:
        return
    with contextlib.suppress(NoSuchRun):
        while True:
            if bus_file.read_address(address.of) != (address.url, address.token):
                break
            await asyncio.sleep(_LOOK_SECONDS)
    await bus.close()


@contextlib.asynccontextmanager
async def observing(run: RunConfig, *, token: str, role: str = "observer") -> AsyncIterator[Bus]:
    """Connect to the run's bus as an observer or an "operator": nothing is created there. Raises ConfigError."""
    bus = await registry.observe(run, token=token, role=role)
    try:
        yield bus
    finally:
        await bus.close()


async def log_records(bus: Bus, topic: Topic[M], *, after: int = 0) -> AsyncGenerator[Record[M], None]:
    """Yield every record after ``after`` that a log has now, in order.

    To stop early, close it (``contextlib.aclosing``).
    """
    last = await bus.last_sequence(topic)
    if not await bus.depth(topic):
        return
    async with bus.read(topic, after=after) as records:
        sequence = after
        while sequence < last:
            try:
                async with asyncio.timeout(SILENT_SECONDS):
                    record = await anext(records)
            except TimeoutError:
                if not await bus.depth(topic):  # a learner has trimmed all of it since
                    return
                raise BusError(
                    f"the log of {topic.name} gave nothing for {SILENT_SECONDS:.0f} s behind {sequence}"
                ) from None
            sequence = record.sequence
            yield record
