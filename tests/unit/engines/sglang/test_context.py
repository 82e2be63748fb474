"""How much of a model's context an SGLang server takes, as its options and the server itself tell."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from asyncrl.engines.sglang.checks import context_before_start, context_of_server
from asyncrl.engines.sglang.options import Options

URL = "http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("options", "device", "limit"),
    [
        ({}, "cuda", 131_066),
        ({}, "cpu", 65_530),  # the KV pool of a CPU server
        ({"url": URL}, "cpu", 131_066),
        ({"url": URL, "server_arguments": {"context-length": 64}}, "cuda", 131_066),  # not an option of that server
        ({"server_arguments": {"--context_length": "64"}}, "cuda", 58),
        ({"server_arguments": {"max-total-tokens": 1000}}, "cuda", 994),
        ({"server_arguments": {"max-total-tokens": 1000, "page-size": 64}}, "cuda", 872),
        ({"server_arguments": {"context-length": 64, "max-total-tokens": 1000}}, "cpu", 58),
        ({"server_arguments": {"context-length": 10**6}}, "cuda", 131_066),
        ({"server_arguments": {"context-length": "long"}}, "cuda", 131_066),  # the server refuses it
    ],
)
def test_options_tell_what_a_server_will_take(options: dict[str, Any], device: str, limit: int) -> None:
    assert context_before_start(Options(**options), device=device, of_model=131_072) == limit


@pytest.mark.parametrize(
    ("info", "limit"),
    [
        ({}, 122),  # an old server
        ({"max_req_input_len": 122, "max_total_num_tokens": 65_536, "page_size": 1}, 122),
        ({"max_req_input_len": 58}, 58),
        ({"max_req_input_len": 4000}, 128),
        ({"max_req_input_len": 122, "max_total_num_tokens": 192, "page_size": 64}, 64),
    ],
)
def test_a_server_takes_what_it_says_and_no_more_than_the_model(info: dict[str, Any], limit: int) -> None:
    assert context_of_server(info, Options(), url=URL, device="cuda", of_model=128) == limit


def test_a_server_that_takes_less_than_its_options_told_is_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    context_of_server({"max_req_input_len": 122}, Options(), url=URL, device="cuda", of_model=128)
    assert not caplog.messages
    context_of_server({"max_req_input_len": 58}, Options(), url=URL, device="cuda", of_model=128)
    assert "takes up to 58 tokens of prompt and answer together, not the 122" in caplog.text
