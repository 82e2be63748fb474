"""POST JSON to a server, and again while it is unreachable or busy: what rewards have in common that ask a server."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import aiohttp

from asyncrl.config.secret_values import hide_credentials
from asyncrl.errors import OUTAGES, ConfigError, RewardError
from asyncrl.logs import printable
from asyncrl.outage import outage_kind, status_kind

T = TypeVar("T")

_MOST_BACKOFF_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    url: str = field(repr=False)  # may hold a password
    """Address of the server, http://HOST:PORT/PATH."""
    retries: int = 3
    """Number of retries if the server is unreachable, too slow or busy (429, 5xx)."""
    backoff_seconds: float = 0.5
    """Wait before the first retry; doubles each time. A longer Retry-After of the server takes precedence."""
    request_timeout_seconds: float = 10.0
    """Time limit of one try; all tries of a group must fit into reward.timeout_seconds."""
    headers: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Headers of each request, such as {Authorization = "Bearer ..."}."""

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"url must start with http:// or https://, got {hide_credentials(self.url)!r}")
        if self.retries < 0 or self.backoff_seconds < 0 or self.request_timeout_seconds <= 0:
            raise ConfigError("retries and backoff_seconds must be >= 0, request_timeout_seconds > 0")


class AskAgain(Exception):
    """The answer cannot be used, but another one may be.

    seconds  time to wait before; None: the usual back-off
    """

    def __init__(self, problem: str, *, seconds: float | None = None) -> None:
        super().__init__(problem)
        self.seconds = seconds


class Away(AskAgain):
    """The server does not answer, or not now (429, 5xx).  kind: as in outage.py"""

    def __init__(self, problem: str, *, kind: str, seconds: float | None = None) -> None:
        super().__init__(problem, seconds=seconds)
        self.kind = kind


class JsonServer:
    """One server. Keeps its connections between groups."""

    def __init__(self, options: HttpOptions, *, path: str = "", name: str) -> None:
        """name   of the reward, for error messages"""
        self._options = options
        self._url = options.url.rstrip("/") + path if path else options.url
        self._name = name
        self._session: aiohttp.ClientSession | None = None

    async def ask(
        self, body: Mapping[str, Any], read: Callable[[Any], T], *, before: Callable[[], None] = lambda: None
    ) -> T:
        """POST ``body`` until ``read`` takes the answer, which raises AskAgain for one that it cannot use.

        before  called before each try
        Raises RewardError; Outage if the server was away at the last try.
        """
        tries = self._options.retries + 1
        for number in range(tries):
            before()
            wait = self._options.backoff_seconds * 2**number
            try:
                return read(await self._post(body))
            except AskAgain as error:
                last, wait = error, wait if error.seconds is None else error.seconds
            if number + 1 < tries:
                await asyncio.sleep(min(wait, _MOST_BACKOFF_SECONDS))
        problem = f"after {tries} tries: {last}" if tries > 1 else str(last)
        raise self.error(problem, kind=OUTAGES.get(last.kind, RewardError) if isinstance(last, Away) else RewardError)

    async def _post(self, body: Mapping[str, Any]) -> Any:
        try:
            return await self._post_once(body)
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError) as error:
            raise Away(f"{type(error).__name__}: {error}".rstrip(": "), kind=outage_kind(error)) from error

    async def _post_once(self, body: Mapping[str, Any]) -> Any:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=self._options.request_timeout_seconds),
                headers={name: str(value) for name, value in self._options.headers.items()},
            )
        # A redirect would take the headers, which may hold a key, to whatever host the answer names.
        options = {**proxy_of(self._url), "allow_redirects": False}
        async with self._session.post(self._url, json=body, **options) as response:
            status = f"HTTP {response.status} {response.reason}"
            if 300 <= response.status < 400:
                where = hide_credentials(response.headers.get("Location", "nowhere"))[:200]
                raise self.error(f"{status}: it redirects to {where}, and no redirect is followed; set that as url")
            if kind := status_kind(response.status):
                named = response.headers.get("Retry-After", "")  # seconds, or a date
                raise Away(status, kind=kind, seconds=float(named) if named.isdecimal() else None)
            if response.status >= 400:
                text = (await response.text())[:200].splitlines()
                raise self.error(f"{status}: {text[0] if text else ''}")
            try:
                return await response.json(content_type=None)
            except ValueError as error:
                raise self.error(f"the answer is not JSON: {error}") from None

    def error(self, problem: str, *, kind: type[RewardError] = RewardError) -> RewardError:
        """Return an error of one line; ``problem`` may hold text of the server."""
        return kind(printable(f"reward {self._name}: {hide_credentials(self._options.url)}: {problem}"))

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None


def proxy_of(url: str) -> dict[str, Any]:
    """Return aiohttp's options for the environment's proxy (http_proxy, https_proxy, no_proxy), for addresses outside.

    This machine and its network are reached directly: localhost, private addresses, and names like "judge" or
    "judge.internal", which only a resolver inside knows. aiohttp's own ``trust_env`` is not used: it would also replace
    a judge's key by what ~/.netrc says for its host.
    """
    address = urllib.parse.urlsplit(url)
    host = address.hostname or ""
    if _is_inside(host) or urllib.request.proxy_bypass(address.netloc.rpartition("@")[2]):
        return {}
    proxy = urllib.request.getproxies().get(address.scheme, "")
    proxy = proxy if "://" in proxy or not proxy else f"http://{proxy}"
    if not proxy.startswith(("http://", "https://")):
        return {}
    given = urllib.parse.urlsplit(proxy)
    made: dict[str, Any] = {"proxy": given._replace(netloc=given.netloc.rpartition("@")[2]).geturl()}
    if given.username:
        name, password = urllib.parse.unquote(given.username), urllib.parse.unquote(given.password or "")
        made["proxy_auth"] = aiohttp.BasicAuth(name, password)
    return made


def _is_inside(host: str) -> bool:
    try:
        return not ipaddress.ip_address(host).is_global
    except ValueError:
        name = host.rstrip(".")
        is_local = "." not in name or name.endswith((".local", ".internal", ".localhost", ".lan"))
        return is_local or name == socket.gethostname()
