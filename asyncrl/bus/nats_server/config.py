"""bin/nats-config: writes the configuration of a nats-server, or of each server of a cluster, with a user for each role
and each rollout worker of every run.

The servers of a cluster differ only in name, addresses and store. They authenticate to each other with a separate
password. Tests: tests/integration/security/test_permissions.py, tests/integration/cluster/test_nats_cluster.py.
"""

from __future__ import annotations

import argparse
import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from asyncrl.bus.jetstream.layout import HEADER_BYTES
from asyncrl.bus.nats_server.accounts import accounts, server_user, user_name, worker_user
from asyncrl.config.checks import MOST_WORKERS
from asyncrl.durable_files import write_whole
from asyncrl.errors import ConfigError
from asyncrl.messages.topics import NAMED_ROLES, ROLES

CONFIG_FILE: Final = "nats-server.conf"
_CLUSTER: Final = "asyncrl"
_PORT, _ROUTE_PORT = 4222, 6222
_LAST_PORT: Final = 65535
_LISTEN: Final = re.compile(r"(?:\[[0-9a-fA-F:.]+\]|[^:\[\]\s/@]*):(-1|\d+)")
"""With port -1 nats-server chooses a free one."""
_WORKERS: Final = 16
_NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}")
_LARGEST_MESSAGE: Final = 2**30
"""nats-server counts the bytes of a message, including headers, in 31 bits."""
_MAX_PENDING_BYTES: Final = 256 * 2**20
"""Bytes that the server buffers for a slow reader before it drops the connection; the server's default is 64 MiB."""
_LONGEST_SYNC_SECONDS: Final = 86400.0
SYNC_SECONDS: Final = 1.0
"""nats-server's default is two minutes. A power failure then loses the last two minutes of every stream."""


@dataclass(frozen=True, slots=True)
class Node:
    """One server of a cluster: its address for clients and for the other servers."""

    host: str
    port: int = _PORT
    route_port: int = _ROUTE_PORT

    @property
    def interface(self) -> str:
        """Interface to listen on: all, but only loopback if ``host`` is a loopback address."""
        return self.host if self.host in ("127.0.0.1", "localhost", "[::1]") else "0.0.0.0"


def node(text: str) -> Node:
    """Parse HOST[:PORT[:ROUTE_PORT]]; an IPv6 address is in brackets. Raises ValueError."""
    match = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^:\[\]\s/@]+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        raise ValueError(f"{text!r} is not HOST[:PORT[:ROUTE_PORT]]")
    made = Node(match[1], int(match[2] or _PORT), int(match[3] or _ROUTE_PORT))
    if not (0 < made.port <= _LAST_PORT and 0 < made.route_port <= _LAST_PORT):
        raise ValueError(f"ports must be in 1..{_LAST_PORT}, got {text!r}")
    return made


def server_config(
    passwords: dict[str, dict[str, str]], *, listen: str, store: Path, max_message_bytes: int, sync_seconds: float
) -> dict[str, Any]:
    """Return the configuration of a nats-server, which reads it as JSON.

    passwords     run -> user -> password
    sync_seconds  how often it syncs its store; 0: every message before it is acknowledged
    """
    parts: dict[str, dict[str, Any]] = {}
    for run, users in passwords.items():
        parts |= accounts(run, users)
    return {
        "listen": listen,
        "max_payload": max_message_bytes + HEADER_BYTES,
        "max_pending": max(_MAX_PENDING_BYTES, 4 * max_message_bytes),
        "jetstream": {
            "store_dir": str(store),
            "sync_interval": f"{max(1, round(1000 * sync_seconds))}ms" if sync_seconds else "always",
        },
        **({"accounts": parts} if parts else {}),
    }


def cluster_part(nodes: Sequence[Node], index: int, *, password: str, tls: dict[str, Any] | None) -> dict[str, Any]:
    """Return the part of server ``index``'s configuration that concerns the cluster.

    Servers do not advertise their addresses to clients, which use only those in ``bus.url``: a server's own address may
    mean nothing to a client behind a tunnel or a load balancer.
    """
    own = nodes[index]
    cluster: dict[str, Any] = {
        "name": _CLUSTER,
        "listen": f"{own.interface}:{own.route_port}",
        "authorization": {"user": _CLUSTER, "password": password},
        "routes": [f"nats://{_CLUSTER}:{password}@{other.host}:{other.route_port}" for other in nodes if other != own],
        "no_advertise": True,
    }
    if tls:
        cluster["tls"] = tls
    return {"server_name": server_name(index), "cluster": cluster}


def server_name(index: int) -> str:
    return f"server-{index + 1}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = _parser()
    options = parser.parse_args(arguments)
    for run in options.runs:
        if not re.fullmatch("[A-Za-z0-9_-]+", run):
            parser.error(f"{run!r} is not a run.name: letters, digits, - and _")
    for name in options.join:
        if not _NAME.fullmatch(name):
            parser.error(f"--join {name!r}: a worker's name here has at most 100 letters, digits, -, _ and .")
    if not 0 <= options.workers <= MOST_WORKERS:
        parser.error(f"--workers must be in 0..{MOST_WORKERS}, got {options.workers}")
    try:
        nodes = [node(text) for text in options.cluster or ()]
    except ValueError as error:
        parser.error(f"--cluster: {error}")
    addresses = {(one.host, port) for one in nodes for port in (one.port, one.route_port)}
    if nodes and (len(nodes) not in (3, 5) or len(addresses) < 2 * len(nodes)):
        parser.error("--cluster takes three (or five) servers, each at another address")
    if nodes and options.listen:
        parser.error("--listen is for one server; --cluster says where its servers listen")
    _check_tls(parser, options)
    if options.listen and not ((found := _LISTEN.fullmatch(options.listen)) and int(found[1]) <= _LAST_PORT):
        parser.error(f"--listen must be HOST:PORT with a port of at most {_LAST_PORT}, got {options.listen!r}")
    if not 0 <= options.sync_seconds <= _LONGEST_SYNC_SECONDS:
        parser.error(f"--sync-seconds must be in 0..{_LONGEST_SYNC_SECONDS:.0f}, got {options.sync_seconds}")
    if not 0 < options.max_message_bytes <= _LARGEST_MESSAGE:
        parser.error(f"--max-message-bytes must be in 1..{_LARGEST_MESSAGE}, got {options.max_message_bytes}")
    try:
        _write(options, nodes)
    except ConfigError as error:
        parser.error(str(error))


def _check_tls(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if bool(options.tls_certificate) != bool(options.tls_key):
        parser.error("--tls-certificate and --tls-key require each other")
    for option, path in (("--tls-client-ca", options.tls_client_ca), ("--tls-cluster-ca", options.tls_cluster_ca)):
        if path and not options.tls_certificate:
            parser.error(f"{option} needs --tls-certificate and --tls-key: without them the server does not use TLS")
    if options.tls_cluster_ca and not options.cluster:
        parser.error("--tls-cluster-ca is for the routes of --cluster")
    if options.cluster:
        return  # the files are on the servers' hosts
    for name in ("tls_certificate", "tls_key", "tls_client_ca"):
        file: Path | None = getattr(options, name)
        if file and not file.is_file():
            parser.error(f"--{name.replace('_', '-')}: {file}: no such file")


class _Parser(argparse.ArgumentParser):
    """Reports an error in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="bin/nats-config",
        description="Write a nats-server configuration in which every role and every worker of every run has its own "
        "password, and only the rights that it needs. Existing passwords are kept; remove a worker's file to end its "
        "rights. To add workers, repeat the command with --join, then run `nats-server --signal reload`. To add runs, "
        "repeat it with all of them, and reload twice: the second reload connects new accounts.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="run.name of each run on the server")
    add(
        "--directory",
        type=Path,
        required=True,
        help="for nats-server.conf, RUN/ROLE, RUN/workers/NAME",
    )
    add("--listen", metavar="HOST:PORT", help=f"(default: 0.0.0.0:{_PORT})")
    add(
        "--cluster",
        nargs="+",
        metavar="HOST[:PORT[:ROUTE_PORT]]",
        help="write server-1/nats-server.conf, server-2/... of a cluster, one for each of these three (or five) hosts "
        f"(ports: {_PORT} for clients, {_ROUTE_PORT} for each other)",
    )
    add(
        "--workers",
        type=int,
        default=_WORKERS,
        metavar="N",
        help="users for as many workers that `asyncrl run` starts (w0, w1, ..., and e0, e1, ... that only evaluate); "
        "(default: %(default)s)",
    )
    add(
        "--join",
        nargs="+",
        default=[],
        metavar="NAME",
        help="users for workers that join by themselves: `asyncrl rollout-worker FILE --name NAME`",
    )
    add(
        "--servers",
        nargs="+",
        default=[],
        metavar="NAME",
        help="users for servers of frozen models that `asyncrl run` starts: [servers.NAME] of the run file",
    )
    add("--max-message-bytes", type=int, default=8 * 2**20, help="(default: %(default)s)")
    add(
        "--sync-seconds",
        type=float,
        default=SYNC_SECONDS,
        help="seconds between syncs of stored messages; a power failure loses what was stored since; 0: before each "
        "acknowledgement (default: %(default)s)",
    )
    add(
        "--tls-certificate",
        type=Path,
        help="PEM certificate of the server; requires TLS of all clients; with --cluster, certificate, key, "
        "and CAs are paths on the servers' hosts",
    )
    add("--tls-key", type=Path)
    add("--tls-client-ca", type=Path, help="PEM of a CA; clients must show a certificate that it signed")
    add("--tls-cluster-ca", type=Path, help="PEM of the CA that signed the servers' certificates, for their routes")
    return parser


def _write(options: argparse.Namespace, nodes: Sequence[Node]) -> None:
    directory: Path = options.directory.absolute()
    # A damaged file is refused before anything is written.
    passwords = {
        run: {
            user: _password(directory / run / user, user_name(run, user)) for user in _users(directory / run, options)
        }
        for run in options.runs
    }
    routes, route_user = directory / "routes.password", user_name(_CLUSTER, "routes")
    route_password = _password(routes, route_user) if nodes else ""
    for run, users in passwords.items():
        for user, password in users.items():
            _write_private(directory / run / user, f"{user_name(run, user)}:{password}\n")
    if nodes:
        _write_private(routes, f"{route_user}:{route_password}\n")
    tls = _tls(options, options.tls_client_ca, verify=bool(options.tls_client_ca))
    between = _tls(options, options.tls_cluster_ca, verify=False)
    for index in range(len(nodes) or 1):
        own = directory / server_name(index) if nodes else directory
        config = server_config(
            passwords,
            listen=f"{nodes[index].interface}:{nodes[index].port}" if nodes else options.listen or f"0.0.0.0:{_PORT}",
            store=own / "jetstream",
            max_message_bytes=options.max_message_bytes,
            sync_seconds=options.sync_seconds,
        )
        config |= {"tls": tls} if tls else {}
        config |= cluster_part(nodes, index, password=route_password, tls=between) if nodes else {}
        _write_private(own / CONFIG_FILE, json.dumps(config, indent=2) + "\n")
        print(f"nats-server --config {own / CONFIG_FILE}" + (f"   on {nodes[index].host}" if nodes else ""))
    if nodes:
        scheme = "tls" if tls else "nats"
        url = ",".join(f"{scheme}://{one.host}:{one.port}" for one in nodes)
        print(f'bus.url = "{url}"; bus.replicas = {len(nodes)}')
    for run in options.runs:
        print(f'run {run}: bus.credentials = "{directory / run}/{{role}}"; a worker\'s node needs only its file')


def _users(folder: Path, options: argparse.Namespace) -> list[str]:
    """Return the users of a run: its roles, the workers that it starts, that may join, or that have a file, and the
    servers of frozen models."""
    started = [f"{kind}{number}" for kind in "we" for number in range(options.workers)]
    there = sorted(path.name for path in (folder / "workers").glob("[!.]*"))
    names = dict.fromkeys([*started, *options.join, *there])
    servers = [*options.servers, *(path.name for path in (folder / NAMED_ROLES["model-server"]).glob("[!.]*"))]
    roles = (role for role in ROLES if role not in NAMED_ROLES)
    return [*roles, *map(worker_user, names), *map(server_user, sorted(dict.fromkeys(servers)))]


def _tls(options: argparse.Namespace, authority: Path | None, *, verify: bool) -> dict[str, Any] | None:
    if not options.tls_certificate:
        return None
    tls = {"cert_file": str(options.tls_certificate.absolute()), "key_file": str(options.tls_key.absolute())}
    return tls | ({"ca_file": str(authority.absolute())} if authority else {}) | ({"verify": True} if verify else {})


def _password(path: Path, user: str) -> str:
    """Return the password in the file, or a new one if there is no file. Raises ConfigError for a damaged file."""
    text = _text(path)
    if text is None:
        return secrets.token_urlsafe(32)
    owner, _, password = text.partition("\n")[0].partition(":")
    if owner != user or not password.strip():
        raise ConfigError(
            f"{path}: does not begin with a line {user}:PASSWORD; put it back from a copy, or remove it to get a new "
            "password"
        )
    return password


def _text(path: Path) -> str | None:
    """Return the text of a file; None if there is none. Raises ConfigError."""
    try:
        return path.read_text()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise ConfigError(f"{path}: cannot be read: {reason}") from None


def _write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, completely or not at all. Raises ConfigError.

    A file that has this text already stays as it is, with its owner and mode.
    """
    if _text(path) == text:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_whole(path, text, mode=0o600)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None


if __name__ == "__main__":
    main()
