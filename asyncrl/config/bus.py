"""[bus]: the server through which the processes of a run communicate, and what it stores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

from asyncrl.config.checks import NonNegative, Positive, Range, require

_LARGEST_MESSAGE: Final = 2**30
"""nats-server counts the bytes of a message, including headers, in 31 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BusSection:
    kind: str = "nats"
    """Transport of the run's messages: a name, or "package.module:Class"."""
    url: str = field(default="", repr=False)  # may hold a password
    """nats://HOST:PORT of a running server; empty: start one for this run. For a cluster, list the URLs of its servers,
    separated by commas (nats://A:4222,nats://B:4222,nats://C:4222); a client that loses its server connects to another
    one."""
    replicas: int = 1
    """Number of copies of each message that the cluster at url keeps: 1, 3 or 5. With 3, the bus survives the loss of
    one server."""
    address: str = field(default="", repr=False)
    """Address of the server that `asyncrl run` started. It sets this for its processes (ASYNCRL_BUS_URL); leave it
    empty."""
    token: str = field(default="", repr=False)
    """Token of the server, or USER:PASSWORD. Prefer the environment variable ASYNCRL_BUS_TOKEN, which keeps it out of
    files."""
    credentials: str = ""
    """File with USER:PASSWORD, an NKEY seed, or a .creds file. {role} in the path is replaced by learner, operator or
    observer, in a rollout worker by workers/NAME, and in a server ([servers.NAME]) by servers/NAME. `bin/nats-config`
    writes such files."""
    tls_ca: str = ""
    """PEM file of the CA that signed the server's certificate. The connection uses TLS if this is set or the url starts
    with tls://."""
    tls_certificate: str = ""
    """PEM file of the client certificate, for a server that requires one; {role} works as in credentials."""
    tls_key: str = ""
    """PEM file with the private key of tls_certificate."""
    port: Annotated[int, Range(low=0, high=65_535)] = 0
    """Port of the server that is started for this run; 0: a free port."""
    store: Literal["file", "memory"] = "file"
    """Where JetStream keeps messages. file survives a restart of the server; memory does not."""
    sync_seconds: NonNegative[float] = 1.0
    """Seconds between syncs of the server's files to disk, for the server started for this run: what a power failure
    may cost. 0: sync each message before it is acknowledged."""
    max_message_bytes: Annotated[int, Range(low=1, high=_LARGEST_MESSAGE)] = 8 * 2**20
    """Maximum message size (max_payload) of the server started for this run."""
    max_group_bytes: Positive[int] = 2**30
    """Maximum size of a trajectory group, at most half of max_log_bytes. A larger group fails. A group larger than
    max_message_bytes is stored in pieces."""
    max_log_bytes: Positive[int] = 4 * 2**30
    """Maximum size of the trajectory log. The log is trimmed up to the second newest checkpoint. Workers wait while it
    is full."""
    connect_seconds: Positive[float] = 10.0
    """How long a starting process tries to reach a server that does not answer before it exits with code 1."""
    ack_seconds: Annotated[float, Range(low=0.1)] = 30.0
    """A prompt is redelivered to another worker after its worker was silent for this many seconds."""
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)  # may hold secrets
    """Options of your own bus class; nats and memory take none."""

    def __post_init__(self) -> None:
        require(
            not self.url or "://" in self.url,
            f"url must start with nats:// or tls://, got {self.url.partition(':')[0]}:...",
        )
        require(self.replicas in (1, 3, 5), f"replicas must be 1, 3 or 5, got {self.replicas}")
        require(bool(self.url) or self.replicas == 1, "replicas are for a cluster of servers at url")
        require(
            bool(self.url) or not (self.credentials or self.tls_ca or self.tls_certificate),
            "credentials, tls_ca and tls_certificate are for a server at url",
        )
        require(bool(self.tls_certificate) or not self.tls_key, "tls_key is of tls_certificate, which is empty")
        require(not (self.token and self.credentials), "token and credentials exclude each other: set one of them")
