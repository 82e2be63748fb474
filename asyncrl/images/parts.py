"""Images in chat messages: content parts as OpenAI, Anthropic, Hugging Face and verl write them, in one form.

    {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}      OpenAI's chat completions
    {"type": "input_image", "image_url": "https://..."}                           OpenAI's responses
    {"type": "image", "source": {"type": "base64", "data": "..."}}                Anthropic
    {"type": "image", "image": ..., or "path", "url", "base64", "bytes"}          Hugging Face's chat templates
    {"type": "image"}                                  Hugging Face, for the next image of the row's column of images
    "Compare <image> with <image>."                    verl, for the next images of the row's column

All become {"type": "image"}, which the model's chat template turns into its placeholder.

Tests: tests/unit/images/test_parts.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from asyncrl.errors import ImageError

MARK: Final = "<image>"
"""Stands for an image in a text, as in verl's and LLaVA's data."""
PART: Final[Mapping[str, str]] = {"type": "image"}
_TEXTS: Final = ("text", "input_text", "output_text")
IMAGE_TYPES: Final = ("image", "image_url", "input_image")
_KEYS: Final = ("image", "image_url", "url", "path", "base64", "bytes")

Message = Mapping[str, Any]
Source = Any
"""Where an image is: its bytes, a path, URL or data URL, base64, or a table of those (images/sources.py)."""


def has_images(messages: Sequence[Message]) -> bool:
    """Whether a message has a part that is an image."""
    return any(isinstance(one, Mapping) and one.get("type") in IMAGE_TYPES for one in _all_parts(messages))


def find_part_problem(content: Sequence[Any]) -> str:
    """Return why the parts of a message cannot be shown to a model; "" if they can."""
    for part in content:
        if not isinstance(part, Mapping) or not isinstance(kind := part.get("type"), str):
            return 'a part of a message is an object with a "type"'
        if kind in _TEXTS and not isinstance(part.get("text"), str):
            return f'a part of type {kind!r} has its text under "text"'
        if kind not in (*_TEXTS, *IMAGE_TYPES):
            return f"a part of a message is text or an image, not {kind!r}; audio and video are not there"
    return ""


def take_images(
    messages: Sequence[Message], column: Sequence[Source] = ()
) -> tuple[list[dict[str, Any]], list[Source]]:
    """Return the messages with every image as PART, and where the images are, in order.

    A message of text parts alone becomes text. If no place stands for the ``column``, its images come first in the
    first message of the user.  Raises ImageError for an image part without an image, or with more or fewer places than
    the column has images.
    """
    left, places = iter(column), 0
    taken = list[Source]()

    def next_of_column() -> Source:
        nonlocal places
        places += 1
        return next(left, None)

    made = list[dict[str, Any]]()
    for message in messages:
        content = message.get("content")
        if isinstance(content, str) and column and MARK in content:
            content = [{"type": "text", "text": content}]
        if not isinstance(content, list):
            made.append(dict(message))
            continue
        parts = list[dict[str, Any]]()
        for part in _split(content) if column else content:
            if part.get("type") not in IMAGE_TYPES:
                parts.append({"type": "text", "text": part["text"]})
                continue
            source = source_of(part)
            taken.append(next_of_column() if source is None else source)
            parts.append(dict(PART))
        made.append({**message, "content": _plain(parts)})
    if column and not places:
        first = next((one for one in made if one.get("role") == "user"), None)
        if first is None:
            raise ImageError("no message of the user can show the row's images")
        before = sum(len(_parts(one)) - len(_text_parts(one)) for one in made[: made.index(first)])
        text = first["content"] if isinstance(first["content"], list) else [{"type": "text", "text": first["content"]}]
        first["content"] = [*(dict(PART) for _ in column), *text]
        return made, [*taken[:before], *column, *taken[before:]]
    if places != len(column):
        raise ImageError(f"the prompt has places for {places} images, and the row has {len(column)}")
    return made, taken


def without_images(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages of ``take_images`` with their text alone, for checks of the text."""
    return [
        {**one, "content": "".join(part["text"] for part in _text_parts(one))} if _parts(one) else dict(one)
        for one in messages
    ]


def source_of(part: Mapping[str, Any]) -> Source | None:
    """Return where the part's image is; None: in the row's column."""
    if isinstance(source := part.get("source"), Mapping):  # Anthropic
        part = {"base64": source.get("data")} if source.get("type") == "base64" else {"url": source.get("url")}
    found = next((part[key] for key in _KEYS if part.get(key) is not None), None)
    if isinstance(found, Mapping) and "url" in found:  # OpenAI
        found = found["url"]
    if found is None and part.get("type") != "image":
        raise ImageError(f"a part of type {part.get('type')!r} has no image")
    return {"base64": found} if found is not None and part.get("base64") is found else found


def _split(content: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield the parts of a message, with an image in place of each MARK of their texts."""
    for part in content:
        if part.get("type") in IMAGE_TYPES:
            yield part
            continue
        for number, piece in enumerate(part["text"].split(MARK)):
            if number:
                yield PART
            if piece:
                yield {"type": "text", "text": piece}


def _plain(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    return "".join(part["text"] for part in parts) if all("text" in part for part in parts) else parts


def _parts(message: Message) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def _text_parts(message: Message) -> list[Any]:
    return [part for part in _parts(message) if "text" in part]


def _all_parts(messages: Sequence[Message]) -> Iterator[Any]:
    for message in messages:
        if isinstance(message, Mapping):
            yield from _parts(message)
