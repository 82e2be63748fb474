"""Images in an agent's requests: one mark in every dialect, parts for the template, placeholders in the tokens."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from asyncrl.environments.agent.endpoint.images import as_data_urls, files_of, with_parts, without_images
from asyncrl.environments.agent.endpoint.request import Refused, content, digests, message
from asyncrl.images.reading import write_png

RED, BLUE = (write_png(8, 8, bytes(colour) * 64) for colour in ((255, 0, 0), (0, 0, 255)))


def openai(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(data).decode()}"}}


def anthropic(data: bytes) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(data).decode()}
    return {"type": "image", "source": source}


@pytest.mark.parametrize("form", [openai, anthropic])
def test_an_image_keeps_its_place_among_the_text(form: Any) -> None:
    said = message({"role": "user", "content": [{"type": "text", "text": "a"}, form(RED), "b", form(BLUE)]}, "m")
    assert files_of([said]) == [RED, BLUE]
    assert without_images(said["content"]) == "ab"
    assert [part["type"] for part in with_parts(said)["content"]] == ["text", "image", "text", "image"]


def test_no_text_of_a_page_is_taken_for_an_image() -> None:
    """Icons of web fonts use these characters, too."""
    said = message({"role": "user", "content": "\ue000AAA=\ue001 Home \ue000"}, "m")
    assert files_of([said]) == []
    assert without_images(said["content"]) == said["content"]
    assert with_parts(said) == said


def test_conversations_with_other_images_are_others() -> None:
    red, blue, red_again = (
        digests([{"role": "tool", "content": content([form(data)], "tool")}])[-1]
        for form, data in ((openai, RED), (openai, BLUE), (anthropic, RED))
    )
    assert red == red_again != blue


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
        {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
        {"type": "image", "path": "/etc/passwd"},
        {"type": "image"},
        {"type": "image", "base64": base64.b64encode(b"no picture").decode()},
        {"type": "input_audio"},
    ],
)
def test_what_is_no_image_is_refused(part: dict[str, Any]) -> None:
    with pytest.raises(Refused, match=r"^m\[0\]: (it is|its|a part of type)"):
        content([part], "m")


def test_a_harness_gets_the_prompts_images_and_may_send_them_back() -> None:
    shown = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}]
    (given,) = as_data_urls(shown, [RED])
    assert files_of([message(given, "m")]) == [RED]
