"""Read an image's file from where data or an agent says that it is.

Tests: tests/unit/images/test_sources.py.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import stat
import urllib.parse
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import aiohttp

from asyncrl.errors import ImageError

MOST_BYTES: Final = 64 * 2**20
"""Most bytes of an image's file."""
FETCH_SECONDS: Final = 60.0
"""Most time for an image of a URL: redirects, and the whole file."""


def read_source(source: Any, *, folder: Path | None, allow_urls: bool) -> bytes:
    """Return an image's file.

    source      bytes; a table of Hugging Face's {"bytes": ..., "path": ...} or {"base64": ...}; a data URL; a URL;
                a path
    folder      folder of relative paths; None: neither paths nor URLs are read, as those of an agent
    allow_urls  whether http(s) is fetched

    Raises ImageError.
    """
    if isinstance(source, Mapping):
        for key in ("bytes", "base64", "path", "url", "image"):
            if source.get(key) is not None:
                value = source[key]
                return _decode(value) if key == "base64" else read_source(value, folder=folder, allow_urls=allow_urls)
        raise ImageError(f"it names no image: {', '.join(map(str, source)) or 'an empty table'}")
    if isinstance(source, bytes | bytearray | memoryview):
        return _limited(bytes(source))
    if source is None:
        raise ImageError("it is missing")
    if not isinstance(source, str):
        raise ImageError(f"it is of type {type(source).__name__}, and must be bytes, a path, a URL or base64")
    if source.startswith("data:"):
        head, comma, text = source.partition(",")
        if not comma or not head.endswith(";base64"):
            raise ImageError("it is a data URL without ;base64")
        return _decode(text)
    if folder is None:
        raise ImageError("it is no data URL, and files and URLs are not read for an agent; send base64")
    if source.startswith(("http://", "https://")):
        return _fetch(source, is_allowed=allow_urls)
    is_url = source.startswith("file://")
    return _read(folder / (urllib.parse.unquote(source.removeprefix("file://")) if is_url else source))


def _decode(text: Any) -> bytes:
    if not isinstance(text, str) or len(text) > 4 * MOST_BYTES / 3 + 4:
        raise ImageError("it is no base64 text, or too long")
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        raise ImageError("it is not base64") from None


def _read(path: Path) -> bytes:
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):  # a device has no end, and a pipe may wait for ever
            raise OSError("it is no file")
        if found.st_size > MOST_BYTES:
            raise OSError(f"it has more than {MOST_BYTES:,} bytes")
        return path.read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        shown = str(path) if len(str(path)) <= 200 else f"{str(path)[:197]}..."
        raise ImageError(f"{shown} cannot be read: {reason}") from None


def _fetch(url: str, *, is_allowed: bool) -> bytes:
    if not is_allowed:
        raise ImageError(f"{url[:200]} is a URL, and images.allow_urls is false")
    try:
        with ThreadPoolExecutor(1) as thread:  # `asyncrl regrade` reads rows where a loop runs already
            return thread.submit(asyncio.run, _download(url)).result()
    except TimeoutError:
        raise ImageError(f"{url[:200]} cannot be fetched: it is not there whole after {FETCH_SECONDS:g} s") from None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise ImageError(f"{url[:200]} cannot be fetched: {error}") from None


async def _download(url: str) -> bytes:
    limit = aiohttp.ClientTimeout(total=FETCH_SECONDS)
    async with (
        aiohttp.ClientSession(timeout=limit, trust_env=True, raise_for_status=True) as session,
        session.get(url) as response,
    ):
        data = bytearray()
        async for piece in response.content.iter_any():
            data += piece
            if len(data) > MOST_BYTES:
                break
        return _limited(bytes(data))


def _limited(data: bytes) -> bytes:
    if len(data) > MOST_BYTES:
        raise ImageError(f"it has more than {MOST_BYTES:,} bytes")
    return data
