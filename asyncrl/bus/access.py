"""Who we are to a nats-server, and how it proves who it is: token, password, NKEY or credentials file, and TLS.

A secret is in a file of its own, named in the run file, or in the environment (ASYNCRL_BUS_TOKEN); it is in no message,
no log and no error (tests/test_secrets.py).
"""

from __future__ import annotations

import importlib.util
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from asyncrl.errors import ConfigError

ROLES: Final = ("learner", "rollout-worker", "operator", "observer")
"""Who connects. The learner's processes and `asyncrl run`; workers; `asyncrl scale`; and those that only look."""

_JWT: Final = "-----BEGIN NATS USER JWT-----"
_SEED: Final = "SU"
_SEED_CHARACTERS: Final = 58


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Paths may hold ``{role}``, which is ours.

    credentials      a file with one line USER:PASSWORD, or an NKEY seed (SU...), or what `nsc` writes (.creds)
    tls_ca           PEM file of who signed the server's certificate; empty: what the system trusts, if the url is tls://
    tls_certificate  our own, for a server that asks for one, and its key
    """

    role: str = "learner"
    token: str = field(default="", repr=False)
    credentials: str = ""
    tls_ca: str = ""
    tls_certificate: str = ""
    tls_key: str = ""

    def __post_init__(self) -> None:
        assert self.role in ROLES, self.role

    def inbox(self, run: str) -> str:
        """Where answers come: the server's configuration gives each role its own."""
        return f"_INBOX.{run}.{self.role}"

    def options(self) -> dict[str, Any]:
        """What nats-py's ``connect`` takes. Raises ConfigError, without anything secret in it."""
        found: dict[str, Any] = {"token": self.token or None}
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
            raise ConfigError(f"bus.credentials: cannot read {path}: {reason}") from None
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
                f"bus.credentials: {path} must hold one line USER:PASSWORD, an NKEY seed, or what `nsc` writes"
            )
        return {"user": user, "password": password}

    def _tls(self) -> ssl.SSLContext:
        try:
            context = ssl.create_default_context(cafile=str(self._path("tls_ca")) if self.tls_ca else None)
        except OSError as error:  # ssl.SSLError too
            raise ConfigError(f"bus.tls_ca: cannot read {self._path('tls_ca')}: {error}") from None
        if self.tls_certificate:
            certificate, key = self._path("tls_certificate"), self._path("tls_key") if self.tls_key else None
            try:
                context.load_cert_chain(certificate, key)
            except OSError as error:
                raise ConfigError(f"bus.tls_certificate: cannot read {certificate} or its key: {error}") from None
        return context

    def _path(self, key: str) -> Path:
        return Path(getattr(self, key).replace("{role}", self.role))
