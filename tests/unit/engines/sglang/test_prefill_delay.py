"""When an SGLang server delays new prompts to batch them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from asyncrl.engines.sglang import server
from asyncrl.engines.sglang.prefill_delay import ARGUMENTS, prefill_arguments

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
    return prefill_arguments(folder, server_arguments, device=device, tensor_parallel=tensor_parallel)


def test_prompts_wait_for_each_other_on_one_gpu(tmp_path: Path) -> None:
    assert arguments(tmp_path) == ARGUMENTS
    assert arguments(tmp_path, {"text_config": {"layer_types": ["sliding_attention", "full_attention"]}}) == ARGUMENTS
    assert arguments(tmp_path, mem_fraction_static=0.8, context_length=4096) == ARGUMENTS


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
            server_arguments=server_arguments,
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
