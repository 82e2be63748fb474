"""Servers of rewards: no redirect takes a key elsewhere, proxies count outside, and nobody forges a line."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from asyncrl.errors import RewardError
from asyncrl.logs import LineFormatter, in_a_line
from asyncrl.rewards.http import proxy_of
from tests.harness.rewards import load, sample, values

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def ask(handler: Handler, **options: Any) -> list[float]:
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", handler)
    async with TestServer(application) as server:
        return await values(load("remote", url=str(server.make_url("/reward")), retries=0, **options), sample())


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_is_an_error_and_takes_no_key_elsewhere(status: int) -> None:
    asked: list[str] = []

    async def redirect(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response(status=status, headers={"Location": "/elsewhere"})

    with pytest.raises(RewardError, match="redirects to /elsewhere, and no redirect is followed; set that as url$"):
        await ask(redirect, headers={"X-Api-Key": "secret"})
    assert asked == ["/reward"]


async def test_a_servers_body_controls_no_terminal() -> None:
    async def refuse(request: web.Request) -> web.Response:
        return web.Response(status=400, text="\x1b[2Jno\x9b\u202e\rasyncrl run: ALL GOOD")

    with pytest.raises(RewardError) as caught:
        await ask(refuse)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("url", "proxy"),
    [
        ("http://localhost:80/x", ""),
        ("http://127.0.0.1/x", ""),
        ("http://[::1]:80/", ""),
        ("http://judge:8000", ""),
        ("http://judge.internal/", ""),
        ("http://10.0.0.3/", ""),
        ("https://skipped.org/", ""),
        ("http://api.example.com/v1", "http://p:3128"),
        ("https://api.example.com/v1", "http://q:3129"),
        ("http://8.8.8.8/", "http://p:3128"),
    ],
)
def test_the_environments_proxy_counts_for_addresses_outside(
    url: str, proxy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"http": "p:3128", "https": "http://q:3129", "no": "skipped.org"}.items():
        monkeypatch.setenv(f"{name}_proxy", value)
        monkeypatch.delenv(f"{name.upper()}_PROXY", raising=False)
    assert proxy_of(url) == ({"proxy": proxy} if proxy else {})


async def test_a_server_of_this_machine_is_reached_without_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")

    async def answer(request: web.Request) -> web.Response:
        return web.json_response([1.0])

    assert await ask(answer) == [1.0]


def test_a_log_line_that_quotes_others_is_one_printable_line() -> None:
    record = logging.LogRecord(
        "asyncrl", logging.WARNING, "", 0, "failed: %s", ("\x1b[31mx\r\nasyncrl run: GOOD",), None
    )
    assert LineFormatter("%(name)s: %(message)s").format(record) == "asyncrl: failed: ?[31mx asyncrl run: GOOD"
    assert in_a_line("a\n  b\u2028c\x07") == "a b c?"
