"""POST JSON to a server, and again while it is unreachable or busy: what rewards have in common that ask a server."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, TypeVar

import aiohttp

from asyncrl.config.checks import NonNegative, Positive, require_http
from asyncrl.config.secret_values import hide_credentials
from asyncrl.errors import OUTAGES, ConfigError, Outage, RewardError
from asyncrl.logs import printable
from asyncrl.messages.control import ServerAddress
from asyncrl.outage import outage_kind, status_kind

T = TypeVar("T")

_MOST_BACKOFF_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    url: str = field(default="", repr=False)  # may hold a password
    """Address of the server, http://HOST:PORT/PATH."""
    server: str = ""
    """Name of a server of [servers], in place of url."""
    retries: NonNegative[int] = 3
    """Number of retries if the server is unreachable, too slow or busy (429, 5xx)."""
    backoff_seconds: NonNegative[float] = 0.5
    """Wait before the first retry; doubles each time. A longer Retry-After of the server takes precedence."""
    request_timeout_seconds: Positive[float] = 10.0
    """Time limit of one try; all tries of a group must fit into reward.timeout_seconds."""
    headers: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Headers of each request, such as {Authorization = "Bearer ..."}."""

    def __post_init__(self) -> None:
        if bool(self.url) == bool(self.server):
            raise ConfigError("set either url, the address of a server, or server, the name of one of [servers]")
        if self.url:
            require_http(self.url)


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

    def __init__(self, options: HttpOptions, *, path: str = "", is_at_root: bool = False, name: str) -> None:
        """
        path        behind options.url, or behind the address of options.server
        is_at_root  whether the path is behind HOST:PORT of options.server, not behind its /v1
        name        who asks, for error messages
        """
        self._options = options
        self._path = path
        self._is_at_root = is_at_root
        self._name = name
        self._session: aiohttp.ClientSession | None = None

    async def ask(
        self,
        body: Mapping[str, Any],
        read: Callable[[Any], T],
        *,
        servers: Mapping[str, ServerAddress] = MappingProxyType({}),
        before: Callable[[], None] = lambda: None,
    ) -> T:
        """POST ``body`` until ``read`` takes the answer, which raises AskAgain for one that it cannot use.

        servers  where the servers of [servers] are; looked at in each try, for one that was restarted is elsewhere
        before   called before each try
        Raises RewardError; Outage if the server was away at the last try, or if the run knows that it is not up.
        """
        tries = self._options.retries + 1
        for number in range(tries):
            before()
            wait = self._options.backoff_seconds * 2**number
            try:
                return read(await self._post(body, servers))
            except AskAgain as error:
                last, wait = error, wait if error.seconds is None else error.seconds
            if number + 1 < tries:
                await asyncio.sleep(min(wait, _MOST_BACKOFF_SECONDS))
        problem = f"after {tries} tries: {last}" if tries > 1 else str(last)
        raise self.error(problem, kind=OUTAGES.get(last.kind, RewardError) if isinstance(last, Away) else RewardError)

    def model_of(self, servers: Mapping[str, ServerAddress]) -> str:
        """Return the name of the model that options.server serves, which stays when it is restarted."""
        try:
            return servers[self._options.server].model
        except (KeyError, Outage):  # the request says so, and is repeated
            return self._options.server

    async def _post(self, body: Mapping[str, Any], servers: Mapping[str, ServerAddress]) -> Any:
        url, headers = self._options.url.rstrip("/") if self._path else self._options.url, {}
        if name := self._options.server:
            try:
                address = servers[name]
            except KeyError:
                raise self.error("there is no such server in [servers]") from None
            except Outage as error:  # it takes longer than the tries here; the worker waits, and says for what
                raise Outage(f"{self._name}: {error}") from error
            url, headers = address.url, {"Authorization": f"Bearer {address.key}"} if address.key else {}
            url = url.removesuffix("/v1") if self._is_at_root else url
        try:
            return await self._post_once(url + self._path, body, headers)
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError) as error:
            raise Away(f"{type(error).__name__}: {error}".rstrip(": "), kind=outage_kind(error)) from error

    async def _post_once(self, url: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> Any:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=self._options.request_timeout_seconds),
                headers={name: str(value) for name, value in self._options.headers.items()},
            )
        # A redirect would take the headers, which may hold a key, to whatever host the answer names.
        options = {**proxy_of(url), "allow_redirects": False}
        async with self._session.post(url, json=body, headers=headers, **options) as response:
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
        where = f"server {self._options.server}" if self._options.server else hide_credentials(self._options.url)
        return kind(printable(f"{self._name}: {where}: {problem}"))

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
