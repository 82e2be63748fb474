"""The command and environment of an SGLang server, and the settings that are refused before it starts."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from asyncrl import config
from asyncrl.engines.sglang import checks
from asyncrl.engines.sglang import server as sglang_server
from asyncrl.engines.sglang.engine import SGLangEngine
from asyncrl.engines.sglang.options import EXACT, LOADER, Options, by_name, check_arguments, check_exact
from asyncrl.engines.sglang.reply import EXPERTS_OPTION
from asyncrl.errors import ConfigError
from asyncrl.tensors.exact_environment import EXACT_ENVIRONMENT
from tests import ROOT

EXAMPLE = ROOT / "examples" / "gpu.toml"


def command(device: str = "cpu", quantization: str = "", **server_arguments: Any) -> list[str]:
    return sglang_server.server_command(
        Path("/model"),
        device=device,
        dtype="bfloat16",
        port=1234,
        weight_version="0:3",
        tensor_parallel=2,
        stream_interval=16,
        server_arguments=by_name(server_arguments),
        quantization=quantization,
    )


def value_of(words: list[str], option: str) -> str:
    return words[words.index(option) + 1]


def test_every_option_of_sglang_can_be_reached() -> None:
    words = command(
        mem_fraction_static=0.85,
        **{"attention-backend": "triton", "enable-metrics": True, "skip-server-warmup": False},
        cuda_graph_bs=[1, 2],
        json_model_override_args={"a": 1},
    )
    assert value_of(words, "--mem-fraction-static") == "0.85"
    assert value_of(words, "--attention-backend") == "triton"  # overrides our default for a CPU
    assert "--enable-metrics" in words
    assert "--skip-server-warmup" not in words
    assert words[words.index("--cuda-graph-bs") :][:3] == ["--cuda-graph-bs", "1", "2"]
    assert value_of(words, "--json-model-override-args") == '{"a": 1}'


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [("disaggregation_mode", "prefill", "one server"), ("speculative-algorithm", "EAGLE", "draft model")],
)
def test_options_that_sglang_takes_and_that_cannot_work_in_a_run_are_refused(name: str, value: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_arguments(by_name({name: value}))
    check_arguments({"speculative-algorithm": "NGRAM"})
    with pytest.raises(ConfigError, match="draft model"):
        check_arguments({"speculative-algorithm": "EAGLE", "speculative-draft-model-quantization": "fp8"})
    check_arguments({"speculative-algorithm": "NEXTN"}, has_drafts=True)
    with pytest.raises(ConfigError, match="draft model"):
        check_arguments({"speculative-algorithm": "EAGLE3"}, has_drafts=True)


def test_a_misspelled_way_to_speculate_is_refused_before_a_server_starts() -> None:
    with pytest.raises(ConfigError, match="speculative-algorithm = 'NGRAMM': did you mean 'NGRAM'"):
        check_arguments({"speculative-algorithm": "NGRAMM"})
    for taken in ("ngram", "DFLASH", None):
        check_arguments({"speculative-algorithm": taken})


@pytest.mark.parametrize(
    ("said", "ranks"),
    [
        ({}, 1),
        ({"tp_size": 2}, 2),
        ({"tp_size": 4}, 0),
        ({"dp_size": 2}, 0),
        ({"nnodes": 2}, 0),
        ({"quantization": "fp8"}, 0),
        ({"speculative_algorithm": "EAGLE", "speculative_draft_model_path": "/policy"}, 0),
        ({"speculative_algorithm": "NGRAM"}, 1),
        ({"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": "/draft", "tp_size": 4}, 4),
        ({"custom_weight_loader": ["mine.load"]}, 0),
        ({"custom_weight_loader": None}, 0),
    ],
)
def test_our_loader_reads_files_in_plain_servers_and_sglang_in_all_others(said: dict[str, Any], ranks: int) -> None:
    info = {
        "tp_size": 1,
        "dp_size": 1,
        "nnodes": 1,
        "custom_weight_loader": [sglang_server.LOADER],
        "model_path": "/policy",
    }
    assert checks.ranks_with_loader(info | said) == ranks


def test_a_draft_model_of_its_own_is_taken_where_loads_can_leave_it_alone() -> None:
    """SGLang's own loads write the policy into the draft model, too."""
    check_arguments({"speculative-algorithm": "EAGLE3", "speculative-draft-model-path": "/draft"})
    own = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "/draft", "model_path": "/policy"}
    info = own | {"custom_weight_loader": [sglang_server.LOADER]}
    for said in ({"quantization": "fp8"}, {"dp_size": 2}, {"nnodes": 2}):
        with pytest.raises(
            ConfigError, match="speculative-draft-model-path: SGLang would load the policy into the draft"
        ):
            checks.ranks_with_loader(info | said)


@pytest.mark.parametrize(
    "other",
    ['weights.quantization="fp8"', "engine.options.machines=2", "engine.options.server_arguments.data_parallel_size=2"],
)
def test_a_draft_model_of_its_own_is_refused_before_a_server_starts(other: str) -> None:
    draft = ("engine.kind=sglang", "engine.options.tensor_parallel=2", "weights.channel=files")
    own = '{speculative-algorithm = "EAGLE3", speculative-draft-model-path = "/draft"}'
    given = (*draft, f"engine.options.server_arguments={own}")
    SGLangEngine.check(config.load(EXAMPLE, given))
    with pytest.raises(ConfigError, match="would load the policy into the draft"):
        SGLangEngine.check(config.load(EXAMPLE, (*given, other)))


def test_a_server_of_your_own_must_serve_the_format_that_versions_have(tmp_path: Path) -> None:
    """SGLang's server dies when it is to load e4m3 and scales into a bfloat16 model."""
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    for info in ({"quantization": "fp8"}, {"quantization": None, "model_path": str(tmp_path)}):
        assert checks.ranks_with_loader(info, "fp8", is_ours=False) == 0
    (tmp_path / "config.json").write_text('{"quantization_config": null}')
    for info in ({}, {"model_path": str(tmp_path)}, {"model_path": "/none"}, {"quantization": "awq"}):
        with pytest.raises(ConfigError, match=r"serves (unquantized|awq) weights; start it .* --quantization fp8$"):
            checks.ranks_with_loader(info, "fp8", is_ours=False)


def test_a_server_of_your_own_that_serves_quantized_weights_gets_no_unquantized_ones(tmp_path: Path) -> None:
    """SGLang converts them to the server's dtype and keeps the scales of the old ones. Adapters are no weights."""
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    for info in ({"quantization": "fp8"}, {"quantization": None, "model_path": str(tmp_path)}):
        with pytest.raises(ConfigError, match=r'serves fp8 weights, .* or set weights.quantization = "fp8"$'):
            checks.ranks_with_loader(info, is_ours=False)
        assert checks.ranks_with_loader(info, None, is_ours=False) == 0
    with pytest.raises(ConfigError, match=r"serves awq weights, .* without --quantization$"):
        checks.ranks_with_loader({"quantization": "awq"}, is_ours=False)
    (tmp_path / "config.json").write_text('{"quantization_config": null}')
    for info in ({}, {"model_path": str(tmp_path)}, {"model_path": "/none"}):
        assert checks.ranks_with_loader(info, is_ours=False) == 0


def test_a_server_of_experts_in_4_bits_uses_kernels_whose_weights_can_be_loaded_again() -> None:
    words = command("cuda", "int4_group32")
    assert value_of(words, "--quantization") == "compressed-tensors"
    assert value_of(words, "--moe-runner-backend") == "marlin"
    assert "--moe-runner-backend" not in command("cuda", "fp8")


@pytest.mark.parametrize(
    ("quantization", "dtype", "given", "says"),
    [
        ("int4", "bfloat16", {"tensor_parallel": 2}, ""),  # 768 / 2 = 3 x 128
        (
            "int4",
            "bfloat16",
            {"tensor_parallel": 4},
            'an expert of 768 numbers, .* or weights.quantization = "int4_group32"',
        ),
        ("int4_group32", "bfloat16", {"tensor_parallel": 4}, ""),  # 192 = 3 x 64
        ("int4_group32", "bfloat16", {"tensor_parallel": 8}, "needs a multiple of 64"),  # 96
        ("int4_group32", "bfloat16", {"tensor_parallel": 8, "server_arguments": {"ep_size": 8}}, ""),
        ("int4", "float32", {}, "in bfloat16; set model.dtype"),
        ("int4", "bfloat16", {"server_arguments": {"dp_size": 2}}, "remove dp-size"),
        ("int4", "bfloat16", {"server_arguments": {"speculative-algorithm": "NEXTN"}}, 'other than "NGRAM"'),
        ("int4", "bfloat16", {"server_arguments": {"speculative-algorithm": "NGRAM"}}, ""),
        ("int4", "bfloat16", {"tensor_parallel": 2, "machines": 2}, "engines of one machine"),
        ("fp8", "float32", {"tensor_parallel": 8}, ""),
    ],
)
def test_experts_whose_parts_kernels_of_4_bits_do_not_take_are_refused(
    tmp_path: Path, quantization: str, dtype: str, given: dict[str, Any], says: str
) -> None:
    (tmp_path / "config.json").write_text('{"moe_intermediate_size": 768}')
    with pytest.raises(ConfigError, match=says) if says else contextlib.nullcontext():
        checks.check_experts(tmp_path, quantization=quantization, dtype=dtype, options=Options(**given))


def test_every_rank_loads_versions_in_4_bits_with_our_loader() -> None:
    info = {"tp_size": 8, "custom_weight_loader": [LOADER], "quantization": "compressed-tensors"}
    assert checks.ranks_with_loader(info, "int4") == 8
    assert checks.ranks_with_loader(info | {"quantization": "fp8"}, "fp8") == 0
    for lacks in ({"custom_weight_loader": []}, {"dp_size": 2}, {"nnodes": 2}):
        with pytest.raises(ConfigError, match="only asyncrl's loader brings a second version into SGLang"):
            checks.ranks_with_loader(info | lacks, "int4")


def test_a_server_of_your_own_gets_no_versions_in_4_bits() -> None:
    given = ("engine.kind=sglang", "engine.options.url=http://127.0.0.1:1", "weights.quantization=int4")
    with pytest.raises(ConfigError, match=r"^engine.options.url: versions in \"int4\" .*; remove url$"):
        SGLangEngine.check(config.load(EXAMPLE, given))


def test_a_server_is_told_to_keep_experts_only_where_they_are_wanted() -> None:
    words = {
        wanted: sglang_server.server_command(
            Path("/model"),
            device="cuda",
            dtype="bfloat16",
            port=1234,
            weight_version="0:3",
            tensor_parallel=1,
            stream_interval=16,
            server_arguments={},
            reports_experts=wanted,
        )
        for wanted in (True, False)
    }
    assert [f"--{EXPERTS_OPTION}" in words[wanted] for wanted in (True, False)] == [True, False]


def test_a_server_on_a_cpu_compiles_nothing_that_nobody_asks_for() -> None:
    """A start needs no C++ compiler and takes half as long. The user's settings are kept."""

    def disables(device: str, base: Mapping[str, str], **given: Any) -> str | None:
        options = Options(server_arguments=given)
        environment = sglang_server.server_environment(base, device=device, options=options)
        return environment.get("TORCHDYNAMO_DISABLE")

    assert disables("cpu", {}) == "1"
    assert disables("cpu", {}, enable_torch_compile=False) == "1"
    assert disables("cpu", {}, enable_torch_compile=True) is None
    assert disables("cpu", {"TORCHDYNAMO_DISABLE": "0"}) == "0"
    assert disables("cuda", {}) is None


def test_a_server_that_computes_as_its_learner_reads_what_the_learner_reads() -> None:
    """Both sum in the same order, and neither compiles what would round in another way."""
    options = Options(server_arguments=EXACT)
    environment = sglang_server.server_environment({"TORCHDYNAMO_DISABLE": "0"}, device="cuda", options=options)
    assert environment.items() >= {**EXACT_ENVIRONMENT, "TORCHDYNAMO_DISABLE": "1"}.items()
    assert not sglang_server.server_environment({}, device="cuda").keys() & EXACT_ENVIRONMENT.keys()


@pytest.mark.parametrize(
    ("name", "value"),
    [("attention_backend", "fa3"), ("--kv-cache-dtype", "fp8_e5m2"), ("speculative-algorithm", "NGRAM")],
)
def test_options_that_round_in_another_way_are_refused_with_exact_logprobs(name: str, value: str) -> None:
    check_exact({"mem-fraction-static": 0.5, "attention-backend": "triton"})
    with pytest.raises(ConfigError, match="run.exact: engine.options: server_arguments: with"):
        check_exact(by_name({name: value}))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_server_keeps_no_output_of_the_vision_tower_that_new_weights_make_wrong(device: str) -> None:
    """SGLang keeps it by the image's hash, and empties this cache for no new weights."""
    base = {"SGLANG_VLM_CACHE_SIZE_MB": "4096"}
    assert sglang_server.server_environment(base, device=device)["SGLANG_VLM_CACHE_SIZE_MB"] == "0"


def test_a_servers_port_is_free_and_none_that_a_connection_may_get_until_the_server_has_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", sglang_server.find_free_port()))
        in_use = taken.getsockname()[1]
        drawn = iter((in_use, in_use, sglang_server.find_free_port()))
        monkeypatch.setattr(sglang_server._RANDOM, "choice", lambda ports: next(drawn))
        assert sglang_server.find_free_port() != in_use
    assert max(sglang_server._PORTS) < 32_768, "Linux gives connections those from there on, unless told otherwise"


def test_float32_is_refused_on_gpus_before_the_server_starts_and_dies() -> None:
    with pytest.raises(ConfigError, match=r'model.dtype: SGLang has no float32.*"bfloat16"'):
        checks.check_dtype("float32", device="cuda", server_arguments={"device": "cuda"})
    for dtype, device, arguments in (
        ("bfloat16", "cuda", {}),
        ("float32", "cpu", {}),
        ("float32", "cuda", {"dtype": "bfloat16"}),
        ("float32", "cuda", {"device": "cpu"}),
    ):
        checks.check_dtype(dtype, device=device, server_arguments=arguments)


def test_a_mixture_with_a_tied_output_layer_which_sglang_would_not_load_is_refused(tmp_path: Path) -> None:
    tied = {"architectures": ["Qwen3MoeForCausalLM"], "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(tied))
    with pytest.raises(ConfigError, match=r"ignores tie_word_embeddings = true .* \"lm_head.weight\"$"):
        checks.check_architecture(tmp_path, device="cuda")
    for other in ({"tie_word_embeddings": False}, {"architectures": ["Qwen3ForCausalLM"]}):
        (tmp_path / "config.json").write_text(json.dumps(tied | other))
        checks.check_architecture(tmp_path, device="cuda")


def test_a_text_part_that_sglang_serves_only_whole_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"from 0.5.23 on, and this is 0.5.16; use the model's folder as it was pub"):
        checks.check_text_part("Qwen3_5ForCausalLM", version=(0, 5, 16))
    for architecture, version in (
        ("Qwen3_5ForCausalLM", (0, 5, 23)),
        ("Qwen3_5ForCausalLM", ()),
        ("Qwen3_5ForConditionalGeneration", (0, 5, 16)),
    ):
        checks.check_text_part(architecture, version=version)


def test_linear_attention_in_layers_that_sglang_would_not_find_is_refused(tmp_path: Path) -> None:
    def check(**text: Any) -> None:
        layers = {"layer_types": ["linear_attention", "linear_attention", "full_attention"], **text}
        config = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": layers}
        (tmp_path / "config.json").write_text(json.dumps(config))
        checks.check_architecture(tmp_path, device="cuda")

    with pytest.raises(ConfigError, match='add "full_attention_interval": 3 beside layer_types'):
        check()
    check(full_attention_interval=3)


def test_a_model_that_the_cpu_server_gets_wrong_is_refused_on_a_cpu_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Gemma3ForCausalLM"]}')
    checks.check_architecture(tmp_path, device="cuda")
    with pytest.raises(ConfigError, match=r"with a Gemma3ForCausalLM SGLang's CPU server samples .* use a GPU or"):
        checks.check_architecture(tmp_path, device="cpu")
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3NextForCausalLM"]}')
    with pytest.raises(ConfigError, match=r"with a Qwen3NextForCausalLM SGLang's .* does not start; use a GPU$"):
        checks.check_architecture(tmp_path, device="cpu")
    checks.check_architecture(tmp_path / "none", device="cpu")


def test_attention_heads_that_gpus_cannot_share_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_attention_heads": 8, "num_key_value_heads": 2}')
    for tensor_parallel in (1, 2, 4, 8):  # with 4 and 8 the two key-value heads are copied
        checks.check_architecture(tmp_path, device="cuda", options=Options(tensor_parallel=tensor_parallel))
    for tensor_parallel in (3, 16):
        with pytest.raises(ConfigError, match=f"{tensor_parallel} does not divide the model's num_attention_heads, 8"):
            checks.check_architecture(tmp_path, device="cuda", options=Options(tensor_parallel=tensor_parallel))
    checks.check_architecture(tmp_path, device="cpu", options=Options(tensor_parallel=3))
    (tmp_path / "config.json").write_text('{"text_config": {"num_attention_heads": 8}}')  # behind a vision tower
    with pytest.raises(ConfigError, match="3 does not divide the model's num_attention_heads, 8"):
        checks.check_architecture(tmp_path, device="cuda", options=Options(tensor_parallel=3))
    apart = Options(tensor_parallel=3, server_arguments={"enable_dp_attention": True})
    checks.check_architecture(tmp_path, device="cuda", options=apart)


@pytest.mark.parametrize("name", ["num_experts", "n_routed_experts", "num_local_experts"])
def test_experts_that_groups_of_gpus_cannot_divide_are_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({name: 12}))

    def check(tensor_parallel: int, **server_arguments: int) -> None:
        options = Options(tensor_parallel=tensor_parallel, server_arguments=server_arguments)
        checks.check_architecture(tmp_path, device="cuda", options=options)

    for groups in (1, 2, 4):
        check(4, ep_size=groups)
    check(16, ep=8, ep_num_redundant_experts=4)
    with pytest.raises(ConfigError, match="ep-size: 3 does not divide tensor_parallel, 4"):
        check(4, ep=3)
    with pytest.raises(ConfigError, match=f"ep-size: 8 does not divide the model's {name}, 12"):
        check(16, expert_parallel_size=8)


@pytest.mark.parametrize(
    ("server_arguments", "problem"),
    [({"ep-size": 2}, "ep-size: in SGLang's CPU server every part"), ({"enable-dp-attention": True}, "ends a CPU")],
)
def test_what_divides_a_server_on_gpus_is_refused_on_a_cpu(server_arguments: dict[str, Any], problem: str) -> None:
    checks.check_on_cpu({"ep-size": 1, "enable-dp-attention": False}, device="cpu")
    checks.check_on_cpu(server_arguments, device="cuda")
    with pytest.raises(ConfigError, match=problem):
        checks.check_on_cpu(server_arguments, device="cpu")


@pytest.mark.parametrize(
    ("said", "sharing"),
    [
        ({}, 8),
        ({"dp-size": 2}, 8),
        ({"enable_dp_attention": True}, 1),
        ({"enable-dp-attention": True, "dp_size": 2}, 4),
        ({"enable-dp-attention": True, "data-parallel-size": 8}, 1),
        ({"attn-dp-size": 4}, 2),
    ],
)
def test_dp_attention_leaves_fewer_gpus_to_share_the_heads(said: dict[str, Any], sharing: int) -> None:
    assert Options(tensor_parallel=8, server_arguments=said).attention_parallel == sharing
