"""Images in chat messages: the forms of others become one, in the order of their places."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.errors import ImageError
from asyncrl.images.parts import find_part_problem, take_images, without_images

TEXT = {"type": "text", "text": "?"}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": parts[0] if isinstance(parts[0], str) else list(parts)}


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ({"type": "image_url", "image_url": {"url": "data:x"}}, "data:x"),  # OpenAI's chat completions
        ({"type": "input_image", "image_url": "data:x"}, "data:x"),  # OpenAI's responses
        ({"type": "image", "source": {"type": "base64", "data": "aa"}}, {"base64": "aa"}),  # Anthropic
        ({"type": "image", "source": {"type": "url", "url": "https://x"}}, "https://x"),
        ({"type": "image", "image": b"bytes"}, b"bytes"),  # Hugging Face
        ({"type": "image", "path": "a.png"}, "a.png"),
        ({"type": "image", "base64": "aa"}, {"base64": "aa"}),
    ],
)
def test_an_image_of_every_form_becomes_one_part(part: dict[str, Any], source: Any) -> None:
    messages, sources = take_images([user(part, TEXT)])
    assert messages == [user({"type": "image"}, TEXT)]
    assert sources == [source]


def test_marks_and_bare_parts_take_the_images_of_the_column_in_order() -> None:
    messages, sources = take_images([user("Is <image> in <image>?")], ["a.png", "b.png"])
    assert [part["type"] for part in messages[0]["content"]] == ["text", "image", "text", "image", "text"]
    assert sources == ["a.png", "b.png"]
    _, sources = take_images([user({"type": "image"}, TEXT), user({"type": "image"}, TEXT)], ["a.png", "b.png"])
    assert sources == ["a.png", "b.png"]
    (message,), sources = take_images([user({"type": "text", "text": "is <image>"}, {"type": "image"})], ["a", "b"])
    assert message["content"] == [{"type": "text", "text": "is "}, {"type": "image"}, {"type": "image"}]
    assert sources == ["a", "b"]


def test_without_a_place_the_column_comes_before_the_first_question() -> None:
    messages, sources = take_images([{"role": "system", "content": "see"}, user("how many?")], ["a.png"])
    assert messages[1]["content"] == [{"type": "image"}, {"type": "text", "text": "how many?"}]
    assert sources == ["a.png"]


def test_text_alone_stays_text() -> None:
    assert take_images([user(TEXT, TEXT), user("<image>")]) == ([user("??"), user("<image>")], [])
    assert without_images([user({"type": "image"}, TEXT)]) == [user("?")]


@pytest.mark.parametrize("column", [["a.png"], ["a.png", "b.png", "c.png"]])
def test_as_many_places_as_images(column: list[str]) -> None:
    with pytest.raises(ImageError, match=f"places for 2 images, and the row has {len(column)}"):
        take_images([user("<image> <image>")], column)


def test_what_cannot_be_shown_is_named() -> None:
    assert find_part_problem([TEXT, {"type": "image"}]) == ""
    assert "not 'video'" in find_part_problem([{"type": "video"}])
    assert 'under "text"' in find_part_problem([{"type": "text"}])
    assert '"type"' in find_part_problem(["?"])
