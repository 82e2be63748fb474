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
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from asyncrl.errors import ConfigError

LOADER = "asyncrl.engines.sglang.loader.load"
"""Loader of weight files in servers launched by us."""

QUANTIZATIONS: Mapping[str, str] = {"fp8": "fp8"}
"""SGLang's names for the values of weights.quantization."""

CPU_ARGUMENTS: Mapping[str, Any] = {
    "attention-backend": "torch_native",  # the default needs AMX kernels
    "sampling-backend": "pytorch",
    "mem-fraction-static": 0.1,
    "max-total-tokens": 65_536,
    "max-running-requests": 64,
    "sleep-on-idle": True,  # otherwise it spins on a core that the learner could use
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    url: str = ""
    """http://HOST:PORT of a running server, for one worker; a worker that joins needs another one. If the server has
    other weights than those of model.path or this run, it first loads model.path. If empty, asyncrl launches a server
    on a free port."""
    tensor_parallel: int = 1
    """GPUs of the launched server."""
    server_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Any options of `python -m sglang.launch_server`, such as {mem-fraction-static = 0.85}; true sets a flag."""
    start_seconds: float = 600.0
    """Timeout for the server to become healthy."""
    request_seconds: float = 3600.0
    """Timeout of one generation or one load."""
    pause: Literal["in_place", "retract"] = "in_place"
    """Generations in progress during a load: keep their KV cache, or recompute it with the new weights."""
    version_source: Literal["auto", "spans", "stream"] = "auto"
    """Source of each token's version: the server's version spans (0.5.23) or streamed chunks."""
    stream_interval: int = 16
    """Tokens per streamed chunk. Version labels lag by up to this many tokens; smaller chunks reduce throughput."""

    @property
    def attention_parallel(self) -> int:
        """GPUs that share the attention heads. With DP attention they are in parts that serve different sequences."""
        given = {option_name(key): value for key, value in self.server_arguments.items()}
        parts = given.get("attn-dp-size", 1)  # of 0.5.23
        if "enable-dp-attention" in given:
            parts = given.get("dp-size", given.get("data-parallel-size", self.tensor_parallel))
        return max(1, self.tensor_parallel // parts) if isinstance(parts, int) and parts > 0 else self.tensor_parallel

    def __post_init__(self) -> None:
        for name in ("tensor_parallel", "start_seconds", "request_seconds", "stream_interval"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be > 0, got {getattr(self, name)}")
        if self.url and not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"url must start with http:// or https://, got {self.url!r}")


_SURE: Final = frozenset({"model-path", "dtype", "mem-fraction-static"})
"""Options of every version. If any is missing, SGLang declares its options in a way that this parser does not know."""


_OURS: Final = {"model-path": "model.path", "model": "model.path", "port": "", "weight-version": ""}
"""Options that asyncrl sets, with the run file key that controls the value, or "" if there is no such key."""


def check_arguments(server_arguments: Mapping[str, Any]) -> None:
    """Raise ConfigError for options that asyncrl sets, unknown options, and values of the wrong type or choice.

    Options are unknown if the installed SGLang (if any) lacks them. Values are checked only where SGLang's source
    declares types or choices plainly.
    """
    for name in map(option_name, server_arguments):
        if name in _OURS:
            raise ConfigError(
                f"engine.options: server_arguments: {name!r} is set by asyncrl; remove it"
                + (f" and use {_OURS[name]}" if _OURS[name] else "")
            )
    known = known_arguments()
    if not known.keys() >= _SURE:
        return
    for key, value in server_arguments.items():
        name = option_name(key)
        if name in known and (problem := known[name].problem(value)):
            raise ConfigError(f"engine.options: server_arguments: {name} must be {problem}, got {value!r}")
        if any(option.startswith(name) for option in known):  # the server accepts abbreviations
            continue
        near = difflib.get_close_matches(name, known, 1)
        hint = f"; did you mean {near[0]!r}?" if near else "; `python -m sglang.launch_server --help` names them"
        raise ConfigError(f"engine.options: server_arguments: the installed SGLang has no option {name!r}{hint}")


def check_intake_arguments(server_arguments: Mapping[str, Any]) -> None:
    """Raise ConfigError for options with which a server cannot join the learner's broadcasts."""
    for key, value in server_arguments.items():
        if option_name(key) in ("pp-size", "pipeline-parallel-size") and value != 1:
            raise ConfigError(
                f"engine.options: server_arguments: with {key} SGLang cannot receive weights from the learner's "
                'memory; use tensor_parallel, or weights.channel = "files"'
            )
        if option_name(key) == "enable-symm-mem" and value:  # it sets NCCL_CUMEM_ENABLE=1 (weights/nccl.py)
            raise ConfigError(
                f"engine.options: server_arguments: with {key} SGLang's NCCL and the learner's wait for each other "
                'forever; remove it, or use weights.channel = "files"'
            )


def option_name(key: str) -> str:
    """Normalise ``mem_fraction_static`` and ``--mem-fraction-static`` to ``mem-fraction-static``."""
    return key.replace("_", "-").lstrip("-")


@dataclass(frozen=True, slots=True)
class Values:
    """Values that an option accepts. number: int, float or bool; None for others. choices: empty if unknown."""

    number: type[int] | type[float] | None = None
    choices: tuple[object, ...] = ()

    def problem(self, value: object) -> str:
        """Describe what the value should be; "" if the value is acceptable."""
        if self.number is bool:
            return "" if isinstance(value, bool) else "true or false"
        if value is False or isinstance(value, list):  # False leaves the option out
            return ""
        if self.choices and str(value) not in map(str, self.choices):
            return "one of " + ", ".join(map(repr, self.choices))
        if self.number is None:
            return ""
        try:
            self.number(str(value))
        except ValueError:
            return "a whole number" if self.number is int else "a number"
        return ""


@functools.cache
def known_arguments() -> Mapping[str, Values]:
    """Return the options of the installed SGLang without leading dashes; empty if SGLang is not installed."""
    found = importlib.util.find_spec("sglang")
    if found is None or not found.submodule_search_locations:
        return {}
    folder = Path(found.submodule_search_locations[0]) / "srt"
    files = [folder / "server_args.py", *sorted((folder / "arg_groups").rglob("*.py"))]
    known: dict[str, Values] = {}
    for file in files:
        for name, values in _read_declarations(file) if file.is_file() else ():
            if known.get(name, Values()) == Values():
                known[name] = values
            elif values != Values() and values != known[name]:
                known[name] = Values()  # two classes disagree, so do not check
    return known


_NUMBERS: Final[Mapping[str, type[int] | type[float]]] = {"int": int, "float": float, "bool": bool}


_PLAIN: Final = frozenset({"help", "choices", "aliases", "required"})
"""Keywords of a declaration that leave the accepted values to its type. A parser, action or const may change them."""


def _values(annotation: ast.expr) -> Values:
    """Parse ``int``, ``Optional[int]``, ``A[Optional[int], "help"]`` or ``A[str, Arg(choices=["a", "b"])]``."""
    text = ast.unparse(annotation)
    number = re.match(r"(?:A\[|Annotated\[)?(?:Optional\[)?(int|float|bool)\b(?! \|)", text)
    for node in ast.walk(annotation):
        if isinstance(node, ast.keyword) and node.arg not in _PLAIN:
            return Values()
    for node in ast.walk(annotation):
        if isinstance(node, ast.keyword) and node.arg == "choices":
            try:
                return Values(None, tuple(ast.literal_eval(node.value)))
            except (ValueError, TypeError):  # the choices are a name or an expression
                return Values()
    return Values(_NUMBERS[number[1]] if number else None)


def _read_declarations(file: Path) -> Iterator[tuple[str, Values]]:
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for part in node.body:
                if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                    yield option_name(part.target.id), _values(part.annotation)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("--"):
            yield option_name(node.value), Values()
