"""What an SGLang server is started with: its context, waiting prompts."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from asyncrl.engines.sglang import server
from asyncrl.engines.sglang.checks import context_before_start, context_of_server
from asyncrl.engines.sglang.options import PREFILL_DELAY, Options, by_name, prefill_arguments

URL = "http://127.0.0.1:30000"


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


QWEN3: dict[str, Any] = {"architectures": ["Qwen3ForCausalLM"], "layer_types": ["full_attention"] * 2}


def arguments(
    folder: Path,
    config: Mapping[str, Any] = QWEN3,
    *,
    device: str = "cuda",
    tensor_parallel: int = 1,
    **server_arguments: Any,
) -> Mapping[str, Any]:
    (folder / "config.json").write_text(json.dumps(config))
    return prefill_arguments(folder, by_name(server_arguments), device=device, tensor_parallel=tensor_parallel)


def test_prompts_wait_for_each_other_on_one_gpu(tmp_path: Path) -> None:
    assert arguments(tmp_path) == PREFILL_DELAY
    assert (
        arguments(tmp_path, {"text_config": {"layer_types": ["sliding_attention", "full_attention"]}}) == PREFILL_DELAY
    )
    assert arguments(tmp_path, mem_fraction_static=0.8, context_length=4096) == PREFILL_DELAY


def test_the_command_has_them_and_the_user_overrides_each(tmp_path: Path) -> None:
    def command(**server_arguments: Any) -> list[str]:
        (tmp_path / "config.json").write_text(json.dumps(QWEN3))
        return server.server_command(
            tmp_path,
            device="cuda",
            dtype="bfloat16",
            port=1,
            weight_version="0:0",
            tensor_parallel=1,
            stream_interval=16,
            server_arguments=by_name(server_arguments),
        )

    assert "--enable-prefill-delayer" in command()
    assert not [word for word in command(enable_prefill_delayer=False) if "prefill" in word]


@pytest.mark.parametrize(
    "server_arguments",
    [
        {"disable-overlap-schedule": True},
        {"max_running_requests": 256},
        {"prefill-delayer-queue-min-ratio": 0.5},
        {"prefill_delayer_max_delay_passes": 3},
        {"speculative-algorithm": "EAGLE"},
        {"dp-size": 2},
        {"--enable-dp-attention": True},
        {"tp_size": 2},
        {"disable-overlap": True},
        {"max_running": 64},
        {"tp": 2},
        {"config": "server.yaml"},
    ],
)
def test_a_server_with_ways_of_its_own_is_left_as_it_is(tmp_path: Path, server_arguments: dict[str, Any]) -> None:
    assert not arguments(tmp_path, **server_arguments)


@pytest.mark.parametrize(
    "config",
    [
        {"layer_types": ["linear_attention", "full_attention"]},
        {"layer_types": ["mamba", "attention"]},
        {"mamba_d_state": 128},
        {"linear_num_key_heads": 16},
        {"layer_types": ["conv", "full_attention"]},
        {"text_config": {"layer_types": ["linear_attention", "full_attention"]}},
    ],
)
def test_recurrent_layers_for_which_sglang_may_not_overlap_are_left_as_they_are(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    assert not arguments(tmp_path, config)
