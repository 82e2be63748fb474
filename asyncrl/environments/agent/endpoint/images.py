"""Images in an agent's requests: they stand in the text of a message, in base64 between two marks.

So everything that compares, sorts, and remembers messages compares their images too. They become parts of their message
just before the chat template writes it, and their placeholders are expanded in its tokens. The marks hold a number that
no client knows: no text of a web page or a model is taken for an image.

Tests: tests/unit/environments/agent/test_images.py.
"""

from __future__ import annotations

import base64
import re
import secrets
from collections.abc import Sequence
from typing import Any, Final

from asyncrl.errors import ImageError
from asyncrl.images.parts import PART, source_of
from asyncrl.images.reading import read_info
from asyncrl.images.sources import read_source

_BEGIN, _END = f"\ue000{secrets.token_hex(8)}:", "\ue001"  # of Unicode's private use
_MARK: Final = re.compile(f"{_BEGIN}([A-Za-z0-9+/=]*){_END}")


def mark(part: dict[str, Any]) -> str:
    """Return the text that stands for an image part of a request. Raises ImageError, also for a path or a URL."""
    source = source_of(part)
    if source is None:
        raise ImageError("it is missing")
    data = read_source(source, folder=None, allow_urls=False)
    read_info(data)
    return f"{_BEGIN}{base64.b64encode(data).decode()}{_END}"


def files_of(messages: Sequence[dict[str, Any]]) -> list[bytes]:
    """Return the images' files of a conversation, in order."""
    return [base64.b64decode(found) for one in messages for found in _MARK.findall(one.get("content") or "")]


def without_images(text: str) -> str:
    """Return a message's text without its images."""
    return _MARK.sub("", text) if _BEGIN in text else text


def with_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as chat templates expect it: its content as parts, if it shows images."""
    content = message.get("content")
    if not isinstance(content, str) or _BEGIN not in content:
        return message
    parts: list[dict[str, Any]] = []
    for place, piece in enumerate(_MARK.split(content)):  # text, image, text, ...
        if place % 2:
            parts.append(dict(PART))
        elif piece:
            parts.append({"type": "text", "text": piece})
    return {**message, "content": parts}


def as_data_urls(messages: Sequence[dict[str, Any]], files: Sequence[bytes]) -> list[dict[str, Any]]:
    """Return a prompt's messages with its images as OpenAI's data URLs, for a harness to send back.

    files  of the image parts, in order
    """
    left = iter(files)

    def filled(part: dict[str, Any]) -> dict[str, Any]:
        if part != PART:
            return part
        data = next(left)
        url = f"data:{read_info(data).mime_type};base64,{base64.b64encode(data).decode()}"
        return {"type": "image_url", "image_url": {"url": url}}

    return [
        {**one, "content": [filled(part) for part in one["content"]]} if isinstance(one.get("content"), list) else one
        for one in messages
    ]
