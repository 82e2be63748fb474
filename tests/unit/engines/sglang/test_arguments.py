"""What an SGLang server is started with: values that it would refuse, its context, rotary scales, waiting prompts."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from asyncrl.backends import huggingface
from asyncrl.engines.sglang import options as sglang_options
from asyncrl.engines.sglang import server
from asyncrl.engines.sglang.checks import check_rope, context_before_start, context_of_server
from asyncrl.engines.sglang.options import Options
from asyncrl.engines.sglang.prefill_delay import ARGUMENTS, prefill_arguments
from asyncrl.errors import ConfigError
from tests.harness.backends import tiny_model

SOURCE = """
class ServerArgs:
    model_path: str
    dtype: A[str, Arg(choices=["auto", "bfloat16"])] = "auto"
    attention_backend: A[Optional[str], Arg(choices=BACKENDS)] = None
    mem_fraction_static: A[Optional[float], "of the memory"] = None
    max_running_requests: Optional[int] = None
    disable_radix_cache: bool = False
    port: int | str = 0
    level: A[int, Arg(choices=[0, 1, 2])] = 0
    cuda_graph_bs: Optional[List[int]] = None
    tokens: A[int, Arg(help="such as 16k", type_parser=human_readable_int)] = 0
"""


@pytest.fixture
def installed_sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "packages" / "sglang"
    (package / "srt").mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    (package / "srt" / "server_args.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.delitem(__import__("sys").modules, "sglang", raising=False)
    monkeypatch.setattr(sglang_options, "known_arguments", sglang_options.known_arguments.__wrapped__)


@pytest.mark.usefixtures("installed_sglang")
@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"dtype": "int3"}, "dtype must be one of 'auto', 'bfloat16', got 'int3'"),
        ({"mem_fraction_static": "much"}, "mem-fraction-static must be a number, got 'much'"),
        ({"max-running-requests": 1.5}, "max-running-requests must be a whole number, got 1.5"),
        ({"disable-radix-cache": "yes"}, "disable-radix-cache must be true or false, got 'yes'"),
    ],
)
def test_a_value_that_the_server_would_refuse_is_refused_before_it_starts(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        sglang_options.check_arguments(given)
    assert str(raised.value) == f"engine.options: server_arguments: {problem}"


@pytest.mark.usefixtures("installed_sglang")
@pytest.mark.parametrize(
    "given",
    [
        {"dtype": "bfloat16", "mem-fraction-static": 0.8, "max-running-requests": 256, "disable-radix-cache": True},
        {"mem-fraction-static": "0.8", "max-running-requests": "256"},
        {"mem-fraction-static": 1, "max-running-requests": False, "level": "2"},
        {"attention-backend": "anything", "cuda-graph-bs": [1, 2], "tokens": "16k"},
    ],
)
def test_what_the_source_does_not_say_plainly_is_left_to_the_server(given: dict[str, Any]) -> None:
    sglang_options.check_arguments(given)
    with pytest.raises(ConfigError) as raised:  # the one value that is plainly wrong
        sglang_options.check_arguments({**given, "dtype": "int3"})
    assert "dtype must be one of" in str(raised.value)


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


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
LINEAR = {"rope_type": "linear", "factor": 8.0}


def folder_of(path: Path, **changes: Any) -> Path:
    config = {"architectures": ["Qwen3ForCausalLM"]} | changes
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_factor": 0.878}, "attn_factor = 0.878, which SGLang uses and the learner ignores; replace it"),
        ({"extrapolation_factor": 0.5}, "extrapolation_factor = 0.5, which SGLang uses and the learner ignores"),
        ({"attention_factor": 1.0}, "attention_factor = 1.0, which the learner uses and SGLang ignores; replace it"),
    ],
)
def test_a_scale_of_yarn_that_only_one_of_them_reads_is_refused(
    tmp_path: Path, key: str, changes: dict[str, float], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        check_rope(folder_of(tmp_path, **{key: YARN | changes}))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("changes", [{}, {"mscale": 1.0, "mscale_all_dim": 1.0}, {"mscale": 0.7, "mscale_all_dim": 2}])
def test_the_scale_that_both_compute_may_be_written_out(tmp_path: Path, changes: dict[str, float]) -> None:
    """Olmo 3's config.json does so. The learner's scale is the one that transformers computes."""
    folder = tiny_model(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    folder_of(folder, **config | {"rope_parameters": YARN | changes})
    scale = huggingface.read_shape(folder).rope_scale
    check_rope(folder)
    for factor, is_same in ((scale, True), (scale * 1.01, False)):
        folder_of(folder, **config | {"rope_parameters": YARN | changes | {"attention_factor": factor}})
        assert math.isclose(huggingface.read_shape(folder).rope_scale, factor)
        if is_same:
            check_rope(folder)
        else:
            with pytest.raises(ConfigError, match="attention_factor"):
                check_rope(folder)


def test_linear_rope_is_refused_for_gemma_3_alone(tmp_path: Path) -> None:
    default = {"rope_type": "default", "rope_theta": 1e4}
    gemma = {"architectures": ["Gemma3ForCausalLM"]}
    for rope_of in (
        {"rope_scaling": LINEAR},
        {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": default}},
    ):
        with pytest.raises(
            ConfigError, match=r"type 'linear' with factor = 8.0, .* ignores for Gemma 3; .* \"inprocess"
        ):
            check_rope(folder_of(tmp_path, **gemma, **rope_of))
    check_rope(folder_of(tmp_path, **gemma, rope_parameters={"full_attention": default, "sliding_attention": default}))
    check_rope(folder_of(tmp_path, **gemma, rope_scaling=None))
    check_rope(folder_of(tmp_path, rope_scaling=LINEAR))
    check_rope(tmp_path / "none")


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
