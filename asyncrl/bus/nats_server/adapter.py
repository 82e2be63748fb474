"""bus.kind = "nats": NATS JetStream, on a server that the run starts or on the server at bus.url."""

from __future__ import annotations

import glob
import shutil
from pathlib import Path
from urllib.parse import urlsplit

from asyncrl.bus.adapter import BusAdapter
from asyncrl.bus.jetstream.bus import JetStreamBus
from asyncrl.bus.jetstream.credentials import Credentials
from asyncrl.bus.nats_server.server import EmbeddedServer, find_binary
from asyncrl.config import RunConfig
from asyncrl.config.addresses import servers, without_secrets
from asyncrl.errors import ConfigError
from asyncrl.messages.topics import NAMED_ROLES, ROLES

_SCHEMES = ("nats://", "tls://")


class NatsAdapter(BusAdapter):
    @classmethod
    def check(cls, run: RunConfig) -> None:
        cls.options(run)
        _check_url(run.bus.url)
        _check_files(run)

    @classmethod
    def check_machine(cls, run: RunConfig) -> None:
        if not run.bus.url:
            find_binary()
            _check_disk(run)

    @classmethod
    async def connect(cls, run: RunConfig, *, url: str, token: str, role: str, worker: str = "") -> JetStreamBus:
        _check_url(url)
        section = run.bus
        return await JetStreamBus.connect(
            url,
            run=run.run.name,
            access=_credentials(run, role=role, worker=worker, token=token),
            max_prompts=run.window,
            max_log_bytes=section.max_log_bytes,
            max_group_bytes=section.max_group_bytes,
            ack_seconds=section.ack_seconds,
            storage=section.store,
            replicas=section.replicas,
            connect_seconds=section.connect_seconds,
        )

    @classmethod
    def server(cls, run: RunConfig, *, directory: Path, host: str) -> EmbeddedServer:
        return EmbeddedServer(
            directory / "nats",
            run=run.run.name,
            workers=[
                *(f"w{number}" for number in range(run.rollout.workers)),
                *run.pool_workers,
                *(f"e{number}" for number in range(run.num_evaluation_workers)),
            ],
            servers=run.started_servers,
            host=host,
            port=run.bus.port,
            max_message_bytes=run.bus.max_message_bytes,
            sync_seconds=run.bus.sync_seconds,
        )

    @classmethod
    def stored(cls, run: RunConfig, *, directory: Path) -> EmbeddedServer | None:
        store = directory / "nats"
        if run.bus.store == "memory" or not (store / "jetstream").is_dir():
            return None
        return EmbeddedServer(store, run=run.run.name, max_message_bytes=run.bus.max_message_bytes, is_reader=True)


def _credentials(run: RunConfig, *, role: str, worker: str = "", token: str = "") -> Credentials:
    section = run.bus
    return Credentials(
        role=role,
        worker=worker,
        token="" if section.credentials else token,
        credentials=section.credentials,
        tls_ca=section.tls_ca,
        tls_certificate=section.tls_certificate,
        tls_key=section.tls_key,
    )


def _check_disk(run: RunConfig) -> None:
    """Check that a new run's log fits into three quarters of the free disk space, which leaves room for checkpoints."""
    store = run.run_directory / "nats"
    if run.bus.store == "memory" or store.exists():
        return
    there = next(path for path in store.absolute().parents if path.is_dir())
    if (most := shutil.disk_usage(there).free // 4 * 3) < run.bus.max_log_bytes:
        raise ConfigError(
            f"bus.max_log_bytes: {run.bus.max_log_bytes:,} is more than {most:,}, three quarters of what is free at "
            f"{there}; lower it, or name another run.directory"
        )


def _check_files(run: RunConfig) -> None:
    """Check that the files named in [bus] are readable for at least one user: a machine may have only one worker's."""
    users = [(role, "") for role in ROLES]
    for role, folder in NAMED_ROLES.items():
        users += [(role, Path(path).name) for path in glob.glob(run.bus.credentials.replace("{role}", f"{folder}/*"))]
    problems = []
    for role, worker in users:
        try:
            _credentials(run, role=role, worker=worker).options()
        except ConfigError as error:
            problems.append(error)
    if len(problems) == len(users):
        raise problems[0]


def _check_url(url: str) -> None:
    if url and not url.startswith(_SCHEMES):
        raise ConfigError(f"bus: url must start with {' or '.join(_SCHEMES)}, got {url.partition(':')[0]}:...")
    for address in servers(url):
        try:
            parts = urlsplit(address)
            has_host, _ = bool(parts.hostname), parts.port
        except ValueError:
            raise ConfigError(f"bus: url {without_secrets(address)}: the port must be in 1..65535") from None
        if address and not has_host:
            raise ConfigError(f"bus: url {without_secrets(address)}: names no host; write nats://HOST:PORT")
