"""Controls access to the board: open to this machine, by token to others, and closed to pages of other sites.

1. A board on a loopback address answers only requests whose Host is a loopback name. This stops sites that point their
   own name at 127.0.0.1 (DNS rebinding).
2. On any other address a token is required in the first request; a cookie holds it afterwards. The Host must be an
   address or this machine's name, so that no other site's name can point here.
3. Scripts and styles come only from the board (Content-Security-Policy), strings never become HTML (trusted types), and
   no site may show the board in a frame or read its responses.

Tests: tests/integration/board/test_server.py.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import socket
from collections.abc import Awaitable, Callable
from typing import Final

from aiohttp import web

HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def is_loopback(host: str) -> bool:
    """Whether a server bound to ``host`` is reachable only from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Guard:
    """host: address that the board is bound to;  token: required token, "" for none"""

    def __init__(self, *, host: str, token: str) -> None:
        self._is_local = is_loopback(host)
        self._names = {"localhost"} if self._is_local else {"localhost", socket.gethostname(), socket.getfqdn(), host}
        self._token = token
        # Browsers keep one set of cookies for all ports of a machine, so each board needs its own name.
        self.cookie = f"asyncrl-board-{hashlib.sha256(token.encode()).hexdigest()[:8]}"

    async def __call__(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the request before it is handled. Raises HTTPForbidden and HTTPUnauthorized."""
        if not self.is_ours(request.headers.get("Host", "")):
            raise web.HTTPForbidden(text="asyncrl board: open it by its address or this machine's name\n")
        if self._token and not self._has(request.cookies.get(self.cookie, "")):
            if not self._has(request.query.get("token", "")):
                raise web.HTTPUnauthorized(text="asyncrl board: open the address that it printed, with its token\n")
            answer = web.HTTPSeeOther("/")
            answer.set_cookie(self.cookie, self._token, httponly=True, samesite="Strict")
            raise answer
        return await handler(request)

    def is_ours(self, host: str) -> bool:
        """Whether a Host header names this machine, rather than a site that points its name here."""
        name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
        name = name.strip("[]").lower()
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return name in {known.lower() for known in self._names}
        return address.is_loopback or not self._is_local

    def _has(self, token: str) -> bool:
        # a cookie may be invalid UTF-8
        return hmac.compare_digest(token.encode(errors="replace"), self._token.encode())
