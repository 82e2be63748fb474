"""reward.kind = "remote": a server rewards each group.

POST url  {"samples": [{"prompt": ..., "completion": ..., "label": ..., "metadata": {...}}, ...]}
answer    {"rewards": [1.0, {"format": 0.2, "correct": 1.0}, ...]}  or only the list; a dict's parts are summed
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from asyncrl.config.secret_values import hide_credentials
from asyncrl.errors import ConfigError, RewardError
from asyncrl.rewards.port import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    url: str = field(repr=False)  # may hold a password
    """Address of the server, http://HOST:PORT/PATH."""
    retries: int = 3
    """Number of retries if the server is unreachable, too slow, or answers 429 or 5xx."""
    backoff_seconds: float = 0.5
    """Wait before the first retry; doubles each time."""
    request_timeout_seconds: float = 10.0
    """Time limit of one try; all tries together must fit into reward.timeout_seconds."""
    headers: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Headers of each request, such as {Authorization = "Bearer ..."}."""

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"url must start with http:// or https://, got {hide_credentials(self.url)!r}")
        if self.retries < 0 or self.backoff_seconds < 0 or self.request_timeout_seconds <= 0:
            raise ConfigError("retries and backoff_seconds must be >= 0, request_timeout_seconds > 0")


class RemoteReward:
    """Sends one request per group. Keeps no connection open between groups."""

    def __init__(self, options: Options) -> None:
        self._options = options

    async def __call__(self, samples: Sequence[Sample]) -> Sequence[Any]:
        body = {
            "samples": [
                {"prompt": s.prompt, "completion": s.completion, "label": s.label, "metadata": dict(s.metadata)}
                for s in samples
            ]
        }
        timeout = aiohttp.ClientTimeout(total=self._options.request_timeout_seconds)
        headers = {name: str(value) for name, value in self._options.headers.items()}
        async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session:
            for retry in range(self._options.retries + 1):
                try:
                    return await self._ask(session, body)
                except (aiohttp.ClientConnectionError, TimeoutError, ServerBusy) as error:
                    if retry == self._options.retries:
                        raise self._error(f"{type(error).__name__}: {error}", tries=retry + 1) from error
                await asyncio.sleep(self._options.backoff_seconds * 2**retry)
        raise AssertionError("the last try returns or raises")

    async def _ask(self, session: aiohttp.ClientSession, body: dict[str, Any]) -> Sequence[Any]:
        async with session.post(self._options.url, json=body) as response:
            if response.status == 429 or response.status >= 500:
                raise ServerBusy(f"HTTP {response.status} {response.reason}")
            if response.status >= 400:
                text = (await response.text())[:200].splitlines()
                raise self._error(f"HTTP {response.status} {response.reason}: {text[0] if text else ''}", tries=1)
            try:
                answer = await response.json(content_type=None)
            except ValueError as error:
                raise self._error(f"the answer is not JSON: {error}", tries=1) from None
        rewards = answer.get("rewards") if isinstance(answer, dict) else answer
        if not isinstance(rewards, list):
            raise self._error(f'the answer must be {{"rewards": [...]}} or a list, is {str(answer)[:60]}', tries=1)
        return rewards

    def _error(self, problem: str, *, tries: int) -> RewardError:
        after = f" after {tries} tries" if tries > 1 else ""
        return RewardError(f"reward remote: {hide_credentials(self._options.url)}{after}: {problem}")


class ServerBusy(Exception):
    """The server answered 429 or 5xx."""
