"""[engine.options] of engine.kind = "sglang", and the options of the installed SGLang server.

SGLang's options are parsed from its source without importing it. SGLang declares an option as a field of ServerArgs, as
a field of a class under arg_groups/ (0.5.23), or in an add_argument call. All such names are accepted, so no valid
option is refused. The server itself refuses the few names that are not options.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from asyncrl.config.adapter import RunConfig
from asyncrl.config.checks import Positive, require_http
from asyncrl.data.model_folder import read_if_valid
from asyncrl.errors import ConfigError
from asyncrl.tensors import int4

LOADER = "asyncrl.engines.sglang.loader.load"
"""Loader of weight files in servers launched by us."""

QUANTIZATIONS: Mapping[str, str] = {
    "fp8": "fp8",
    "fp8_ue8m0": "fp8",
    **dict.fromkeys(int4.GROUPS, "compressed-tensors"),
}
"""SGLang's names for the values of weights.quantization."""

INT4_ARGUMENTS: Mapping[str, Any] = {
    "moe-runner-backend": "marlin",  # Blackwell's default, Triton, cannot undo its repacking before a load
    "disable-prefill-cuda-graph": True,  # repacked experts were never loaded under these graphs
}
"""For experts in 4 bits."""

CPU_ARGUMENTS: Mapping[str, Any] = {
    "attention-backend": "torch_native",  # the default needs AMX kernels
    "sampling-backend": "pytorch",
    "mem-fraction-static": 0.1,
    "max-total-tokens": 65_536,
    "max-running-requests": 64,
    "sleep-on-idle": True,  # otherwise it spins on a core that the learner could use
}

MEMORY_SAVER: Mapping[str, Any] = {"enable-memory-saver": True, "enable-weights-cpu-backup": True}
"""For run.colocated. Weights are backed up on the host, because the engine may resume before newer weights arrive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    url: str = ""
    """http://HOST:PORT of a running server, for one worker; a worker that joins needs another one. If its weights
    are others, it first loads model.path. Empty: asyncrl launches a server on a free port."""
    tensor_parallel: Positive[int] = 1
    """GPUs of the launched server."""
    machines: Positive[int] = 1
    """Machines of the launched server, which tensor_parallel is divided among. With launcher "ray" each part runs on
    another machine, with "local" all on this one. By hand: `asyncrl engine-node`."""
    server_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Any options of `python -m sglang.launch_server`, such as {mem-fraction-static = 0.85}; true sets a flag."""
    start_seconds: Positive[float] = 600.0
    """Timeout for the server to become healthy."""
    request_seconds: Positive[float] = 3600.0
    """Timeout of one generation or one load."""
    pause: Literal["in_place", "retract"] = "in_place"
    """Generations in progress during a load: keep their KV cache, or recompute it with the new weights."""
    version_source: Literal["auto", "spans", "stream"] = "auto"
    """Source of each token's version: the server's version spans (0.5.23) or streamed chunks."""
    stream_interval: Positive[int] = 16
    """Tokens per streamed chunk. Version labels lag by up to this many tokens; smaller chunks reduce throughput."""

    @property
    def attention_parallel(self) -> int:
        """GPUs that share the attention heads. With DP attention they are in parts that serve different sequences."""
        given = self.server_arguments
        parts = given.get("attn-dp-size", 1)  # of 0.5.23
        if "enable-dp-attention" in given:
            parts = given.get("dp-size", self.tensor_parallel)
        return max(1, self.tensor_parallel // parts) if isinstance(parts, int) and parts > 0 else self.tensor_parallel

    def __post_init__(self) -> None:
        object.__setattr__(self, "server_arguments", by_name(self.server_arguments))
        if self.url:
            require_http(self.url)
        if self.machines > 1:
            self._check_machines()

    def _check_machines(self) -> None:
        """Raise ConfigError for what no server over several machines can be."""
        if self.url:
            raise ConfigError("machines: a server of your own (url) is on its machines already; remove one of the two")
        if self.tensor_parallel % self.machines:
            raise ConfigError(
                f"tensor_parallel: {self.tensor_parallel} GPUs cannot be divided among machines = {self.machines}"
            )
        if has_replicas(self.server_arguments):
            raise ConfigError(
                "machines: SGLang keeps replicas (dp-size) on one machine; use rollout.workers for replicas, or "
                "enable-dp-attention in server_arguments"
            )


_SURE: Final = frozenset({"model-path", "dtype", "mem-fraction-static"})
"""Options of every version. If any is missing, SGLang declares its options in a way that this parser does not know."""


_OURS: Final = {"model-path": "model.path", "model": "model.path", "port": "", "weight-version": ""}
"""Options that asyncrl sets, with the run file key that controls the value, or "" if there is no such key."""
_OF_MACHINES: Final = ("nnodes", "node-rank", "dist-init-addr")
_ON_POLICY: Final = "rl-on-policy-target"
EXACT: Final[Mapping[str, Any]] = {
    "enable-deterministic-inference": True,
    _ON_POLICY: "fsdp",
    "attention-backend": "triton",
    "disable-prefill-cuda-graph": True,  # compiled graphs round in another way
}
"""Options with which a server computes as the learner does (run.exact; backends/kernels/sglang_rows.py)."""
_ROUNDING: Final = (
    *("dtype", "quantization", "kv-cache-dtype", "enable-fp32-lm-head"),
    *("prefill-attention-backend", "decode-attention-backend", "enable-dp-attention", "speculative-"),
)
"""Prefixes of options that change how a server rounds, and that the learner does not follow."""
DRAFT_MODELS: Final = frozenset({"EAGLE", "EAGLE3", "NEXTN", "STANDALONE"})
"""Values of speculative-algorithm with a draft model. Without speculative-draft-model-path it is in the folder of every
version, which holds the policy, and with learner.options.draft_coefficient its own draft layers."""
OWN_DRAFTS: Final = frozenset({"EAGLE", "NEXTN"})
"""Those that use the draft layers of the model itself."""


def computes_as_learner(server_arguments: Mapping[str, Any]) -> bool:
    """Return whether a server with these options is one of ``EXACT``."""
    return _ON_POLICY in server_arguments


def check_exact(server_arguments: Mapping[str, Any]) -> None:
    """Raise ConfigError for options with which a server computes in another way than the learner (run.exact)."""
    for name, value in server_arguments.items():
        if name.startswith(_ROUNDING) or EXACT.get(name, value) != value:
            raise ConfigError(
                f"run.exact: engine.options: server_arguments: with {name} the server rounds in another way than the "
                "learner; remove it"
            )


def has_drafts(run: RunConfig) -> bool:
    """Return whether the folder of every version has the model's draft layers, trained with the policy."""
    return run.learner.options.get("draft_coefficient", 0) > 0 and run.weights.channel == "files"


def check_arguments(server_arguments: Mapping[str, Any], *, is_frozen: bool = False, has_drafts: bool = False) -> None:
    """Raise ConfigError for options that asyncrl sets, or that the installed SGLang (if any) lacks.

    is_frozen   the server's weights never change
    has_drafts  the folder of every version has the model's draft layers
    """
    for name in server_arguments:
        if name in _OURS:
            raise ConfigError(
                f"engine.options: server_arguments: {name!r} is set by asyncrl; remove it"
                + (f" and use {_OURS[name]}" if _OURS[name] else "")
            )
        if name in _OF_MACHINES and not is_frozen:
            raise ConfigError(
                f"engine.options: server_arguments: {name!r} is set by asyncrl; remove it and use machines, or start "
                "the server yourself and name it in url"
            )
    allowed = DRAFT_MODELS if is_frozen else OWN_DRAFTS if has_drafts else frozenset()
    _refuse_unserved(server_arguments, drafts=allowed)
    known = known_arguments()
    if not known >= _SURE:
        return
    for name in server_arguments:
        if any(option.startswith(name) for option in known):  # the server accepts abbreviations
            continue
        near = difflib.get_close_matches(name, known, 1)
        hint = f"; did you mean {near[0]!r}?" if near else "; `python -m sglang.launch_server --help` names them"
        raise ConfigError(f"engine.options: server_arguments: the installed SGLang has no option {name!r}{hint}")


def _refuse_unserved(arguments: Mapping[str, Any], *, drafts: frozenset[str]) -> None:
    """Raise ConfigError for options that SGLang takes and with which no rollout worker can work.

    drafts  draft models whose weights the server has, without a folder of their own
    """
    has_folder = names_draft(arguments)
    for name, value in arguments.items():
        if name.startswith("disaggregation-mode") and value not in (None, "null"):
            raise ConfigError(
                f"engine.options: server_arguments: {name} = {value!r}: one server is started here, which must both "
                "read prompts and sample; remove it (a frozen model that is served so elsewhere: name its router in "
                "servers.NAME.url)"
            )
        if not name.startswith("speculative-algo"):
            continue
        algorithm, known = str(value).upper(), {*DRAFT_MODELS, "NGRAM"}
        near = difflib.get_close_matches(algorithm, known, 1, 0.75)  # others may be a newer SGLang's, or a plugin's
        if near and algorithm not in known:
            raise ConfigError(f"engine.options: server_arguments: {name} = {value!r}: did you mean {near[0]!r}?")
        if algorithm in DRAFT_MODELS - drafts and not has_folder:
            raise ConfigError(
                f"engine.options: server_arguments: {name} = {value!r}: the server would load its draft model from "
                'the folder of every version, which has only the policy; use "NGRAM", which needs none, '
                'speculative-draft-model-path of a model that stays as it is, or "NEXTN" with draft layers that are '
                'trained (learner.options.draft_coefficient, weights.channel = "files")'
            )


def names_draft(server_arguments: Mapping[str, Any]) -> bool:
    """Whether the options name the folder of a draft model."""
    return bool(_draft_folder(server_arguments))


def draft_bytes(server_arguments: Mapping[str, Any]) -> int:
    """Return the bytes of the draft model whose folder the options name; 0 if they name none, or it is not here."""
    folder = _draft_folder(server_arguments)
    return sum(path.stat().st_size for path in Path(folder).glob("*.safetensors")) if folder else 0


def _draft_folder(server_arguments: Mapping[str, Any]) -> str:
    names = ("speculative-draft-model-path", "speculative-draft-model")
    return next((str(server_arguments[name]) for name in names if server_arguments.get(name)), "")


def metrics_arguments() -> dict[str, Any]:
    """Return the option with which a server has metrics of its own, if what serves them is installed."""
    return {"enable-metrics": True} if importlib.util.find_spec("prometheus_client") is not None else {}


def check_updater_arguments(server_arguments: Mapping[str, Any]) -> None:
    """Raise ConfigError for options with which a server cannot join the learner's broadcasts."""
    if has_replicas(server_arguments):
        raise ConfigError(
            "engine.options: server_arguments: replicas of one server (dp-size) cannot receive weights from the "
            'learner\'s memory; use rollout.workers for replicas, enable-dp-attention, or weights.channel = "files"'
        )
    for name, value in server_arguments.items():
        if name == "pp-size" and value != 1:
            raise ConfigError(
                f"engine.options: server_arguments: with {name} SGLang cannot receive weights from the learner's "
                'memory; use tensor_parallel, or weights.channel = "files"'
            )
        if name == "enable-symm-mem" and value:  # it sets NCCL_CUMEM_ENABLE=1 (weights/nccl.py)
            raise ConfigError(
                f"engine.options: server_arguments: with {name} SGLang's NCCL and the learner's wait for each other "
                'forever; remove it, or use weights.channel = "files"'
            )


def has_replicas(server_arguments: Mapping[str, Any]) -> bool:
    """Whether the server has several copies of the model. With DP attention dp-size counts parts of one copy."""
    return server_arguments.get("dp-size", 1) != 1 and not server_arguments.get("enable-dp-attention")


_ONE_NAME: Final = {
    "data-parallel-size": "dp-size",
    "pipeline-parallel-size": "pp-size",
    "expert-parallel-size": "ep-size",
    "ep": "ep-size",
}


def by_name(server_arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return options by the one name that all others here use for each."""
    names = map(option_name, server_arguments)
    return {_ONE_NAME.get(name, name): value for name, value in zip(names, server_arguments.values(), strict=True)}


def option_name(key: str) -> str:
    """Normalise ``mem_fraction_static`` and ``--mem-fraction-static`` to ``mem-fraction-static``."""
    return key.replace("_", "-").lstrip("-")


@functools.cache
def known_arguments() -> frozenset[str]:
    """Return the options of the installed SGLang without leading dashes; empty if SGLang is not installed."""
    found = importlib.util.find_spec("sglang")
    if found is None or not found.submodule_search_locations:
        return frozenset()
    folder = Path(found.submodule_search_locations[0]) / "srt"
    files = [folder / "server_args.py", *sorted((folder / "arg_groups").rglob("*.py"))]
    return frozenset(name for file in files for name in _read_declarations(file))


def _read_declarations(file: Path) -> Iterator[str]:
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for part in node.body:
                if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                    yield option_name(part.target.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("--"):
            yield option_name(node.value)


# -- prefills ----------------------------------------------------------------------------------------------------------

PREFILL_DELAY: Final[Mapping[str, Any]] = {
    "enable-prefill-delayer": True,
    "prefill-delayer-queue-min-ratio": 0.12,
    "prefill-delayer-max-delay-ms": 500,
}
"""A prefill waits until the number of waiting prompts is an eighth of the running requests, for at most half a second.
With fewer than 17 running requests it never waits."""

_OWN_WAYS: Final = (
    "disable-overlap-schedule",  # SGLang refuses it with the delayer, and also the options below that imply it
    *("speculative-", "pp-size", "pipeline-parallel-size", "dllm-", "disaggregation-"),
    *("tp-size", "tensor-parallel-size", "dp-size", "data-parallel-size", "enable-dp-"),  # ranks would sync each step
    "max-running-requests",  # the delayer then also waits, beyond max-delay-ms, for slots for a whole batch
    "config",  # a file that may set any of these
    *PREFILL_DELAY,
    "prefill-delayer-",
)
"""Prefixes of options. If any is set, the server's prefill options are left unchanged."""


def prefill_arguments(
    model_path: Path, server_arguments: Mapping[str, Any], *, device: str, tensor_parallel: int
) -> Mapping[str, Any]:
    """Return options that delay prefills, so that new prompts are batched: each prefill stops decoding, and 30 prompts
    cost little more than one. Nothing if SGLang, model or server cannot use them, or the user chose otherwise.

    When answers end one by one, SGLang by default prefills one new prompt at a time. With 256 answers of a 0.6B model
    in progress this takes a third of the time, and half without CUDA graphs for prefills (docs/results/performance.md,
    "The engine").
    """
    names = [name for given in server_arguments for name in _meant(given)]
    if device != "cuda" or tensor_parallel > 1 or any(name.startswith(_OWN_WAYS) for name in names):
        return {}
    config = read_if_valid(model_path / "config.json")
    if not config or _has_recurrent_layers(config) or not known_arguments() >= PREFILL_DELAY.keys():
        return {}
    return PREFILL_DELAY


def _meant(name: str) -> list[str]:
    """Return the options that ``name`` may abbreviate: the server accepts any unambiguous prefix."""
    known = known_arguments()
    return [name] if name in known else [name, *(option for option in known if option.startswith(name))]


def _has_recurrent_layers(config: Mapping[str, Any]) -> bool:
    """Return whether any layer is recurrent. For some such models SGLang disables overlapped scheduling by itself; for
    others it runs few requests at once to save memory. A model with images nests its layers, as in text_config."""
    layers = config.get("layer_types")
    kinds = map(str, layers) if isinstance(layers, list) else ()
    return (
        any("linear" in kind or not kind.endswith("attention") for kind in kinds)  # mamba, conv, jet
        or any(key.startswith(("mamba", "linear_", "ssm_", "cca")) for key in config)
        or any(_has_recurrent_layers(part) for part in config.values() if isinstance(part, Mapping))
    )
