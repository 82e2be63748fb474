"""What an SGLang server cannot do, refused before it starts or as soon as it is asked: one line with the remedy."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from asyncrl.config.adapter import RunConfig
from asyncrl.data.model_folder import decoder_config, read_if_valid
from asyncrl.engines.sglang.options import (
    CPU_ARGUMENTS,
    DRAFT_MODELS,
    LOADER,
    OWN_DRAFTS,
    QUANTIZATIONS,
    Options,
    names_draft,
)
from asyncrl.errors import ConfigError
from asyncrl.tensors import int4

log = logging.getLogger(__name__)

_OPTIONS: Final = Options()
_FIRST_SAFE_RETRACT = (0, 5, 23)
"""Older servers crash when their cache is flushed while requests are retracted."""
_FIRST_WITH_SPANS = (0, 5, 23)
_FIRST_WITH_EXPERTS: Final = {"MixtralForCausalLM": (0, 5, 22), "MiniMaxM2ForCausalLM": (0, 5, 22)}
"""Before, TopK got no layer_id from these models (srt/models): a server that is to report the experts dies as it
captures its CUDA graphs, and without graphs in a batch of two. 0.5.16 numbers the layers of all other mixtures that the
learner replays."""
_MOST_RANKS_OF_LOADER = 2
"""LOADER reads the whole file in each rank. SGLang's own loader maps it and reads the pages with the rank's part, so
with four or more ranks it should be as fast. Experts in 4 bits need ours with any number."""

_DRAFT_IS_LOADED: Final = (
    "engine.options: server_arguments: speculative-draft-model-path: SGLang would load the policy into the draft model "
    "as well; remove dp-size and weights.quantization, and use engines of one machine"
)
_NEEDS_LOADER: Final = (
    "weights.quantization: in 4 bits only asyncrl's loader brings a second version into SGLang (loader.py); remove "
    'dp-size (rollout.workers starts replicas), custom-weight-loader and speculative-algorithm other than "NGRAM" from '
    "engine.options.server_arguments, and use engines of one machine"
)
_LEAST_OF_MARLIN: Final = 64
"""Its kernels take a matrix in tiles of this width or its multiples (gptq_marlin_repack of 0.5.23)."""
_TEXT_PARTS: Final = ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")
_FIRST_WITH_TEXT_PARTS: Final = (0, 5, 23)
"""SGLang 0.5.16 has these behind their vision towers alone; 0.5.23 by themselves, too."""
_UNTIED: Final = frozenset(
    {
        "Qwen2MoeForCausalLM",
        "Qwen3MoeForCausalLM",
        "Qwen3NextForCausalLM",
        "MixtralForCausalLM",
        "Glm4MoeForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "GptOssForCausalLM",
        "MiniMaxM2ForCausalLM",
    }
)
"""SGLang has an output layer of its own for these, whatever tie_word_embeddings says, and samples from one that nobody
loaded if the folder has none."""

INSTALL_HINT = (
    "engine.kind = 'sglang' needs SGLang, which is not installed: `pip install 'sglang>=0.5.16'` beside a CUDA build "
    "of torch, or without a GPU `pip install -r requirements/sglang-cpu.txt && pip install --no-deps sglang`; "
    "engine.kind = 'inprocess' needs neither"
)


def check_version(options: Options, *, url: str, version: str) -> None:
    """Check that a server of this version does what the options ask of it. Raises ConfigError.

    A server built from source may not know its version: "0.0.0" passes for spans, and its first answer shows them.
    """
    number = numbers(version)
    if options.pause == "retract" and number < _FIRST_SAFE_RETRACT:
        raise ConfigError(f"pause = 'retract' needs SGLang 0.5.23, {url} is {version}")
    if options.version_source == "spans" and (0, 0, 0) < number < _FIRST_WITH_SPANS:
        raise ConfigError(f"version_source = 'spans' needs SGLang 0.5.23, {url} is {version}")


def why_no_experts(architecture: str, *, version: tuple[int, ...]) -> str:
    """Return why SGLang of this version, () or 0.0.0 if unknown, cannot report the experts; "" if it can."""
    first = _FIRST_WITH_EXPERTS.get(architecture, ())
    if not (0, 0, 0) < version < first:
        return ""
    is_now, needed = (".".join(map(str, one)) for one in (version, first))
    return f"SGLang {is_now} cannot report the experts of a {architecture}; install {needed} or later"


def numbers(version: str) -> tuple[int, ...]:
    """Return the version as numbers that compare; () if there are none."""
    return tuple(map(int, re.findall(r"\d+", version)[:3]))  # "0.5.24rc1" is 0.5.24


def check_draft(info: Mapping[str, Any], *, url: str, has_drafts: bool) -> None:
    """Raise ConfigError if an attached server samples with a draft model that versions lack, from its /server_info.

    has_drafts  the folder of every version has the model's own draft layers
    """
    algorithm = _speculation(info)
    if algorithm in DRAFT_MODELS - (OWN_DRAFTS if has_drafts else frozenset()):
        raise ConfigError(
            f"engine.options.url: the server at {url} samples with a draft model ({algorithm}), which versions do not "
            'have and loads would read from their folders; start it without, with "NGRAM", or with "NEXTN" and draft '
            'layers that are trained (learner.options.draft_coefficient, weights.channel = "files")'
        )


def keeps_draft(info: Mapping[str, Any]) -> bool:
    """Whether the server samples with a draft model from a folder of its own, which no version changes; from its
    /server_info."""
    path = info.get("speculative_draft_model_path")
    return _speculation(info) in DRAFT_MODELS and bool(path) and path != info.get("model_path")


def check_own_draft(run: RunConfig, options: Options) -> None:
    """Raise ConfigError for a draft model of its own where no load can leave it alone."""
    given = options.server_arguments
    if names_draft(given) and (run.weights.quantization or options.machines > 1 or given.get("dp-size", 1) != 1):
        raise ConfigError(_DRAFT_IS_LOADED)


def check_adapters(server_arguments: Mapping[str, Any]) -> None:
    """Raise ConfigError for a server that takes no adapters while it is up, as each version is."""
    split = next((key for key in ("attn-dp-size", "dp-size") if server_arguments.get(key, 1) != 1), "")
    if split:
        raise ConfigError(
            f'learner.lora.publish: "adapter": with {split} (engine.options.server_arguments) SGLang takes no '
            'adapters that come and go, as those of versions do; remove it, or use publish = "merged"'
        )


def late_tokens(info: Mapping[str, Any]) -> int:
    """Return how many tokens of an answer, at most, the weights before a load sample after the server has noted it.

    With the overlap scheduler they are those of the step under way: one token, or as many as speculation proposes.

    info  the server's /server_info
    """
    if info.get("disable_overlap_schedule"):
        return 0
    counts = ("speculative_num_draft_tokens", "max_speculative_num_draft_tokens")  # the second may be reached later
    return max(1, *(int(info.get(count) or 1) for count in counts)) if _speculation(info) else 1


def _speculation(info: Mapping[str, Any]) -> str:
    return str(info.get("speculative_algorithm") or "").upper()


def check_attached(run: RunConfig) -> None:
    """Raise ConfigError for what a server that we did not launch cannot do."""
    if run.run.colocated:
        raise ConfigError("run.colocated: a server of your own (engine.options.url) does not release its GPUs")
    if run.weights.quantization in int4.GROUPS:
        raise ConfigError(
            f'engine.options.url: versions in "{run.weights.quantization}" (weights.quantization) were not tried with '
            "servers that asyncrl does not launch; remove url"
        )
    grouped = len(run.pool_workers)
    workers = max(run.rollout.workers, run.rollout.most_workers) + grouped + run.num_evaluation_workers
    if workers > 1:  # they would load their weights into the same server
        raise ConfigError(
            f"engine.options.url: one server serves one worker, and this run may start {workers} (rollout.workers, "
            "rollout.most_workers, rollout.pools, evaluation.workers); use one, or remove url"
        )


def check_machines(run: RunConfig, machines: int) -> None:
    """Raise ConfigError for what a run with engines of several machines cannot do."""
    if machines == 1:
        return
    where = "engine.options.machines"
    if run.run.colocated:
        raise ConfigError(
            f"{where}: engines that take turns with the learner (run.colocated) are on one machine; use 1"
        )
    if run.weights.channel == "objects":
        raise ConfigError(
            f'{where}: with weights.channel = "objects" a version is in a folder of the worker, which the other '
            'machines do not see; use "files" on a disk that all see, or "nccl"'
        )


def check_installed() -> None:
    """Raise ConfigError, with instructions, if SGLang is not installed. Does not import it."""
    if importlib.util.find_spec("sglang") is None:
        raise ConfigError(INSTALL_HINT)


def check_memory_saver() -> None:
    """Raise ConfigError if torch-memory-saver, with which SGLang releases GPUs, is not installed."""
    if importlib.util.find_spec("torch_memory_saver") is None:
        raise ConfigError(
            "run.colocated: SGLang releases GPUs with torch-memory-saver, which is not installed; "
            "pip install torch-memory-saver, or remove it"
        )


def check_dtype(dtype: str, *, device: str, server_arguments: Mapping[str, Any]) -> None:
    """Raise ConfigError for a dtype that would crash the server during startup, minutes later."""
    given = server_arguments
    if given.get("device", device) == "cuda" and given.get("dtype", dtype) in ("float32", "float"):
        raise ConfigError(
            'model.dtype: SGLang has no float32 kernels for GPUs; use "bfloat16", engine.device = "cpu" or '
            'engine.kind = "inprocess"'
        )


_OF_GPUS: Final = {
    "enable-hierarchical-cache": "keeps what leaves a GPU's cache of keys and values in the host's memory",
    "speculative-algorithm": "has kernels for GPUs alone",
    "enable-dp-attention": "ends a CPU server while it starts",
}
"""Options that a CPU server does not serve with, and why."""


def check_on_cpu(server_arguments: Mapping[str, Any], *, device: str) -> None:
    """Raise ConfigError for options with which SGLang's CPU server does not start or answers nothing."""
    for name, value in server_arguments.items():
        if device == "cpu" and value and (why := _OF_GPUS.get(name)):
            raise ConfigError(
                f'engine.options: server_arguments: {name} {why}; use engine.device = "cuda", or remove it'
            )
    if device == "cpu" and server_arguments.get("ep-size", 1) != 1:
        raise ConfigError(
            "engine.options: server_arguments: ep-size: in SGLang's CPU server every part computes all experts; remove "
            "it"
        )


_NOT_ON_A_CPU: Final = {
    "Gemma3ForCausalLM": "samples from another distribution than the model's",
    "DeepseekV3ForCausalLM": "does not start",
    "DeepseekV32ForCausalLM": "does not start",
    "Glm4MoeLiteForCausalLM": "does not start",
    "GlmMoeDsaForCausalLM": "does not start",
    "GptOssForCausalLM": "has no attention with sinks",
    "MiniMaxM2ForCausalLM": "ends at the first prompt",
    "Qwen2_5_VLForConditionalGeneration": "has no image processor",
    "Qwen3VLForConditionalGeneration": "has no image processor",
    "Qwen3VLMoeForConditionalGeneration": "has no image processor",
    "Qwen3NextForCausalLM": "does not start",
    "Qwen3_5ForCausalLM": "does not start",
    "Qwen3_5MoeForCausalLM": "does not start",
    "Qwen3_5ForConditionalGeneration": "does not start",
    "Qwen3_5MoeForConditionalGeneration": "does not start",
}
"""Failures of SGLang 0.5.23's CPU server with tiny models, by architecture. GPUs have kernels for these models."""
_ON_GPUS_ALONE: Final = (
    "DeepseekV32ForCausalLM",
    "GlmMoeDsaForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)
"""The in-process engine does not support them, either."""


def check_architecture(model_path: Path, *, device: str, quantization: str = "", options: Options = _OPTIONS) -> None:
    """Raise ConfigError for a model that the server cannot run. Ignores a folder that cannot be read."""
    if quantization and device == "cpu":
        raise ConfigError(f'weights.quantization: SGLang has no kernels for "{quantization}" on CPUs; remove it')
    config = read_if_valid(model_path / "config.json")
    architectures = config.get("architectures") or [""]
    check_text_part(architectures[0], version=installed_version())
    _check_layers(decoder_config(config))
    if config.get("tie_word_embeddings") and architectures[0] in _UNTIED:
        raise ConfigError(
            f"model.path: SGLang's {architectures[0]} ignores tie_word_embeddings = true and would sample from an "
            "output layer that nobody loads; set it to false in config.json and store a copy of the embeddings as "
            '"lm_head.weight"'
        )
    if device != "cpu":  # the CPU server splits any number of heads
        _check_heads(decoder_config(config), tensor_parallel=options.attention_parallel)
        _check_expert_parallel(decoder_config(config), options)
    elif problem := _NOT_ON_A_CPU.get(architectures[0]):
        other = "" if architectures[0] in _ON_GPUS_ALONE else ' or engine.kind = "inprocess"'
        raise ConfigError(f"model.path: with a {architectures[0]} SGLang's CPU server {problem}; use a GPU{other}")


def check_experts(model_path: Path, *, quantization: str, dtype: str, options: Options) -> None:
    """Raise ConfigError for experts that SGLang's kernels do not take in 4 bits, and for servers that cannot load them
    again. Ignores a folder that cannot be read.

    Each GPU has a part of every expert; with expert parallelism (ep-size), of those of its group.
    """
    group = int4.GROUPS.get(quantization)
    if not group:
        return
    if dtype != "bfloat16":
        raise ConfigError(f'weights.quantization: SGLang computes with "{quantization}" in bfloat16; set model.dtype')
    given = options.server_arguments
    replicas = given.get("dp-size", 1)
    drafts = _speculation({"speculative_algorithm": given.get("speculative-algorithm")})
    if options.machines > 1 or replicas != 1 or drafts not in ("", "NGRAM") or "custom-weight-loader" in given:
        raise ConfigError(_NEEDS_LOADER)
    config = decoder_config(read_if_valid(model_path / "config.json"))
    groups = given.get("ep-size", 1)
    ranks = max(1, options.tensor_parallel // (groups if isinstance(groups, int) and groups > 0 else 1))
    size = config.get("moe_intermediate_size") or config.get("intermediate_size")
    multiple = max(group, _LEAST_OF_MARLIN)
    if isinstance(size, int) and size % (ranks * multiple):
        smaller = ' or weights.quantization = "int4_group32",' if size % (ranks * _LEAST_OF_MARLIN) == 0 else ""
        raise ConfigError(
            f"engine.options: tensor_parallel: {ranks} GPUs share an expert of {size} numbers, of which each needs a "
            f'multiple of {multiple} in "{quantization}"; use fewer,{smaller} or ep-size in server_arguments'
        )


def check_text_part(architecture: str, *, version: tuple[int, ...]) -> None:
    """Raise ConfigError for the text part of a model that SGLang of this version, () if unknown, serves only whole."""
    if architecture in _TEXT_PARTS and () < version < _FIRST_WITH_TEXT_PARTS:
        raise ConfigError(
            f"model.path: SGLang serves a {architecture}, a text part without its vision tower, from 0.5.23 on, and "
            f"this is {'.'.join(map(str, version))}; use the model's folder as it was published"
        )


def installed_version() -> tuple[int, ...]:
    """Return the version of SGLang on this machine; () if it is not installed."""
    try:
        return numbers(importlib.metadata.version("sglang"))
    except importlib.metadata.PackageNotFoundError:
        return ()


def _check_layers(config: Mapping[str, Any]) -> None:
    """Raise ConfigError for linear attention of which SGLang would not find out in which layers it is."""
    layers = config.get("layer_types") or ()
    if "linear_attention" in layers and "full_attention" in layers and not config.get("full_attention_interval"):
        raise ConfigError(
            "model.path: SGLang reads full_attention_interval, which published models have in config.json and "
            f'transformers does not write; add "full_attention_interval": {layers.index("full_attention") + 1} beside '
            "layer_types"
        )


def _check_heads(config: Mapping[str, Any], *, tensor_parallel: int) -> None:
    """Raise ConfigError unless ``tensor_parallel`` GPUs can share the heads.

    Key-value heads may also be replicated, if there are fewer of them than GPUs.
    """
    names = (("num_attention_heads", False), ("num_key_value_heads", True), ("linear_num_key_heads", False))
    for name, may_be_copied in names:
        heads = config.get(name)
        if not isinstance(heads, int) or heads < 1 or heads % tensor_parallel == 0:
            continue
        if not (may_be_copied and tensor_parallel % heads == 0):
            raise ConfigError(
                f"engine.options: tensor_parallel: {tensor_parallel} does not divide the model's {name}, {heads}"
            )


def _check_expert_parallel(config: Mapping[str, Any], options: Options) -> None:
    """Raise ConfigError unless groups of equal size can have as many experts each."""
    given = options.server_arguments
    groups = given.get("ep-size", 1)
    if not isinstance(groups, int) or groups < 2:
        return
    if options.tensor_parallel % groups:
        raise ConfigError(
            f"engine.options: server_arguments: ep-size: {groups} does not divide tensor_parallel, "
            f"{options.tensor_parallel}, the GPUs of the server"
        )
    for name in ("num_experts", "n_routed_experts", "num_local_experts"):
        experts = config.get(name)
        if isinstance(experts, int) and experts % groups and "ep-num-redundant-experts" not in given:
            raise ConfigError(
                f"engine.options: server_arguments: ep-size: {groups} does not divide the model's {name}, {experts}"
            )


def ranks_with_loader(info: Mapping[str, Any], quantization: str | None = "", *, is_ours: bool = True) -> int:
    """Return how many ranks use LOADER, from a server's /server_info; 0 if SGLang's loader must be used.

    Raises ConfigError where that cannot load the format of the weights.
    quantization  that format; None if adapters are loaded
    is_ours       whether we launched the server
    """
    if not is_ours:
        if quantization is not None:
            _require_served(info, quantization)
        return 0
    ranks, has_own_draft, in_4_bits = int(info.get("tp_size") or 1), keeps_draft(info), quantization in int4.GROUPS
    is_plain = (
        LOADER in (info.get("custom_weight_loader") or ())
        and int(info.get("dp_size") or 1) == 1  # SGLang cannot update replicas from tensors
        and int(info.get("nnodes") or 1) == 1  # other hosts cannot see the file we hold open
        and (in_4_bits or not info.get("quantization"))  # SGLang makes FP8 what it needs in its own loader
        and (has_own_draft or _speculation(info) in ("", "NGRAM"))  # else the draft model is read from the folder, too
    )
    if has_own_draft and not is_plain:
        raise ConfigError(_DRAFT_IS_LOADED)
    if in_4_bits and not is_plain:
        raise ConfigError(_NEEDS_LOADER)
    return ranks if is_plain and (has_own_draft or in_4_bits or ranks <= _MOST_RANKS_OF_LOADER) else 0


def is_whole(info: Mapping[str, Any]) -> bool:
    """Whether one process of the server has all its weights, from its /server_info."""
    parts = ("tp_size", "dp_size", "pp_size", "nnodes")
    # a draft model reads the folder after the model has been updated
    return all(int(info.get(part) or 1) == 1 for part in parts) and not info.get("speculative_algorithm")


def _require_served(info: Mapping[str, Any], quantization: str) -> None:
    """Raise ConfigError unless an attached server was started on weights in that format. Others die of a load, or
    convert bfloat16 to e4m3 under the scales of the weights before."""
    served, name = info.get("quantization"), QUANTIZATIONS[quantization] if quantization else None
    config = read_if_valid(Path(str(info.get("model_path"))) / "config.json")
    served = served or (config.get("quantization_config") or {}).get("quant_method")
    if served and not name:
        raise ConfigError(
            f"engine.options.url: the server serves {served} weights, which SGLang cannot load unquantized versions "
            f"into; start it on an unquantized folder without --quantization"
            + (', or set weights.quantization = "fp8"' if served == "fp8" else "")
        )
    if served != name:
        raise ConfigError(
            f'weights.quantization: "{quantization}", but the server at engine.options.url serves '
            f"{served or 'unquantized'} weights; start it on a folder in that format with --quantization {name}"
        )


_UNUSED: Final = 6
"""A request that leaves this many tokens is neither refused nor shortened, whatever the length of its prompt."""


def context_before_start(options: Options, *, device: str, of_model: int) -> int:
    """Return how many tokens a prompt and its answer may have together, as far as the options tell.

    SGLang 0.5.23 (managers/tp_worker.py, managers/scheduler.py, mem_cache/allocator/base.py) refuses a prompt that
    leaves six tokens or fewer of the context, and silently shortens an answer that would leave fewer than two. The KV
    pool limits a request in the same way if it is smaller than the context; besides, up to two of its pages stay empty.
    The size of a GPU's KV pool is known only after the start.

    device    engine.device
    of_model  context length of the model, in tokens
    """
    if options.url:
        return of_model - _UNUSED
    given = dict(CPU_ARGUMENTS) if device == "cpu" else {}
    given |= options.server_arguments
    context, pool, page = (_as_number(given.get(name)) for name in ("context-length", "max-total-tokens", "page-size"))
    longest = min(filter(None, (of_model, context, pool))) - _UNUSED
    return _request_limit(
        {"max_req_input_len": longest, "max_total_num_tokens": pool, "page_size": page}, of_model=of_model
    )


def context_of_server(info: Mapping[str, Any], options: Options, *, url: str, device: str, of_model: int) -> int:
    """Return the limit from the /server_info of the server at ``url``. Warns if the options did not tell."""
    limit, expected = (
        _request_limit(info, of_model=of_model),
        context_before_start(options, device=device, of_model=of_model),
    )
    if limit < expected:
        log.warning(
            "SGLang at %s takes up to %d tokens of prompt and answer together, not the %d that the run counts on, so "
            "longer requests will fail; give it more memory or a larger --context-length, or use shorter prompts",
            url,
            limit,
            expected,
        )
    return limit


def _request_limit(info: Mapping[str, Any], *, of_model: int) -> int:
    of_pool = int(info.get("max_total_num_tokens") or 2**31) - 2 * int(info.get("page_size") or 1)
    return min(of_model, int(info.get("max_req_input_len") or of_model - _UNUSED), of_pool)


def _as_number(value: object) -> int:
    """Return the value of an option; 0 if it is not set, or not a number, which the server refuses."""
    return int(text) if (text := str(value)).isdecimal() else 0
