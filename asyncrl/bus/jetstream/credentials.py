"""Authenticates the client by token, password, NKEY or credentials file, and the server by TLS.

A secret is in a separate file named in the run file, or in the environment (ASYNCRL_BUS_TOKEN, which holds a token or
USER:PASSWORD). It appears in no message, log or error (tests/integration/security/test_secrets.py).
"""

from __future__ import annotations

import importlib.util
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from asyncrl.bus.jetstream.layout import token
from asyncrl.errors import ConfigError
from asyncrl.messages.topics import NAMED_ROLES, ROLES

_JWT: Final = "-----BEGIN NATS USER JWT-----"
_SEED: Final = "SU"
_SEED_CHARACTERS: Final = 58


def inbox(role: str, *, run: str, worker: str = "") -> str:
    """Subject prefix of JetStream's replies. The server's configuration gives each role and worker its own prefix."""
    return f"_INBOX.{run}.{role}" + (f".{token(worker)}" if worker else "")


def answers(role: str, *, run: str, worker: str = "") -> str:
    """Subject prefix of replies from other processes. A role that serves may publish here, but not under ``inbox``."""
    return f"asyncrl-answer.{run}.{role}" + (f".{token(worker)}" if worker else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """How one process authenticates. Paths may contain ``{role}``, which is replaced by our role, or by workers/NAME or
    servers/NAME.

    worker           name of a rollout worker or of a server of a frozen model
    token            a token, or USER:PASSWORD
    credentials      a file with one line USER:PASSWORD, an NKEY seed (SU...), or a .creds file written by `nsc`
    tls_ca           PEM file of the CA of the server's certificate; if empty, a tls:// url uses the system's CAs
    tls_certificate  our client certificate, with ``tls_key``, for a server that requires one
    """

    role: str = "learner"
    worker: str = ""
    token: str = field(default="", repr=False)
    credentials: str = ""
    tls_ca: str = ""
    tls_certificate: str = ""
    tls_key: str = ""

    def __post_init__(self) -> None:
        assert self.role in ROLES, self.role

    @property
    def takes_part(self) -> bool:
        """Whether our process is a part of the run: it waits for streams that are not there yet."""
        return self.role == "learner" or self.role in NAMED_ROLES

    def options(self) -> dict[str, Any]:
        """Return arguments for nats-py's ``connect``. Raises ConfigError without secrets in its text."""
        user, colon, password = self.token.partition(":")
        found: dict[str, Any] = {"user": user, "password": password} if colon else {"token": self.token or None}
        if self.credentials:
            found = self._credentials(self._path("credentials"))
        if self.tls_ca or self.tls_certificate:
            found["tls"] = self._tls()
        return found

    def _credentials(self, path: Path) -> dict[str, Any]:
        try:
            text = path.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not text"
            flag = "--servers" if self.role == "model-server" else "--join"
            hint = f"; bin/nats-config RUN {flag} {self.worker} writes one" if self.worker else ""
            raise ConfigError(f"bus.credentials: cannot read {path}: {reason}{hint}") from None
        is_jwt = text.startswith(_JWT)
        is_seed = text.startswith(_SEED) and len(text) == _SEED_CHARACTERS and ":" not in text
        if (is_jwt or is_seed) and importlib.util.find_spec("nkeys") is None:
            raise ConfigError(f"bus.credentials: {path} needs NKEYs; pip install 'asyncrl[nkeys]'")
        if is_jwt:
            return {"user_credentials": str(path)}
        if is_seed:
            return {"nkeys_seed_str": text}
        user, colon, password = text.partition(":")
        if not colon or not user or not password or "\n" in text:
            raise ConfigError(
                f"bus.credentials: {path} must hold one line USER:PASSWORD, an NKEY seed, or credentials from `nsc`"
            )
        return {"user": user, "password": password}

    def _tls(self) -> ssl.SSLContext:
        try:
            context = ssl.create_default_context(cafile=str(self._path("tls_ca")) if self.tls_ca else None)
        except OSError as error:  # includes ssl.SSLError
            raise ConfigError(f"bus.tls_ca: cannot read {self._path('tls_ca')}: {error}") from None
        if self.tls_certificate:
            certificate, key = self._path("tls_certificate"), self._path("tls_key") if self.tls_key else None
            try:
                context.load_cert_chain(certificate, key)
            except OSError as error:
                raise ConfigError(f"bus.tls_certificate: cannot read {certificate} or its key: {error}") from None
        return context

    def _path(self, key: str) -> Path:
        own = f"{NAMED_ROLES[self.role]}/{self.worker}" if self.worker else self.role
        return Path(getattr(self, key).replace("{role}", own))
