"""`asyncrl import-eval FILE`: converts the evaluation YAML of slime or Miles to [evaluation] of a run file.

A data set's own keys take precedence over those under ``defaults``. Known keys without a counterpart in asyncrl are
reported and left out. A key that neither framework knows is refused, because a misspelt key would silently change the
evaluation.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from asyncrl.config.toml_text import toml_text
from asyncrl.errors import ConfigError

_KEYS: Final[Mapping[str, str]] = {
    "name": "name",
    "path": "path",
    "input_key": "prompt_key",
    "prompt_key": "prompt_key",  # older name in slime
    "label_key": "label_key",
    "metadata_key": "metadata_key",
    "tool_key": "tools_key",
    "metadata_overrides": "metadata",
    "apply_chat_template": "chat_template",
    "apply_chat_template_kwargs": "chat_template_options",
    "n_samples_per_eval_prompt": "samples",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "max_response_len": "max_new_tokens",
    "max_prompt_len": "max_prompt_tokens",
    "max_context_len": "max_context_tokens",
    "min_new_tokens": "min_new_tokens",
    "stop": "stop",
    "stop_token_ids": "stop_token_ids",
    "repetition_penalty": "repetition_penalty",
}
"""slime's key -> asyncrl's key."""
_REWARDS: Final[Mapping[str, Mapping[str, Any]]] = {
    **{kind: {"kind": kind} for kind in ("math", "deepscaler", "dapo", "gpqa", "f1", "ifeval", "ifbench", "random")},
    # asyncrl's rewards look inside the box
    **{f"boxed_{kind}": {"kind": kind} for kind in ("math", "deepscaler", "gpqa", "random")},
    "boxed_dapo": {"kind": "dapo", "options": {"boxed": True}},
    "remote_rm": {"kind": "remote_rm"},
}
"""slime's rm_type -> asyncrl's reward."""
_REMEDIES: Final[Mapping[str, str]] = {
    "custom_rm_path": 'it takes other arguments than a reward here; wrap it: reward = {kind = "package.module:f"}',
    "custom_generate_function_path": "it takes other arguments than a rollout function here; wrap it: "
    'function = "package.module:f"',
    "eval_task_timeout": "evaluation.timeout_seconds limits a whole evaluation, rollout.timeout_seconds a sample",
    **dict.fromkeys(
        (
            *("eval_early_stop", "eval_early_stop_patience", "eval_early_stop_threshold"),
            *("eval_early_stop_min_samples", "min_eval_samples"),
        ),
        "evaluation.enough is the share of all prompts whose answers end an evaluation",
    ),
    "multimodal_keys": "image_key names the column with images",
    **dict.fromkeys(("app_service", "remote_environment"), 'a service is a harness of rollout.function = "agent"'),
    "reward_model": 'a model that judges is reward = {kind = "llm_judge"}',
    "message_processor": "chat_template and chat_template_options make the prompt",
}
"""Key of a data set without a counterpart -> the reason, or what to do instead."""
_AS_HERE: Final[Mapping[str, Any]] = {"skip_special_tokens": False, "no_stop_trim": True}
"""Key of a data set whose value here is always the same: an answer is every token that was sampled."""
_OF_EVAL: Final = ("datasets", "defaults", "eval_interval", "delegate")
_VARIABLE: Final = re.compile(r"\$\{[^}]*\}")
"""Placeholder that OmegaConf or envsubst would replace before the file is read."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="slime's or Miles's evaluation file (--eval-config)")


def run(options: argparse.Namespace) -> int:
    print(read(options.file, say=lambda line: print(line, file=sys.stderr)), end="")
    return 0


def read(path: Path, *, say: Callable[[str], None]) -> str:
    """Read a file and return the text of [evaluation].

    ``say`` is called for each thing that is left out. Raises ConfigError.
    """
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8-sig"))
        return toml(document, say=lambda line: say(f"{path}: {line}"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: is not YAML: {' '.join(str(error).split())}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def toml(document: Any, *, say: Callable[[str], None]) -> str:
    """Convert the content of a file to the text of [evaluation]. Pure."""
    found = document.get("eval", document) if isinstance(document, Mapping) else None
    if not isinstance(found, Mapping) or not found.get("datasets"):
        raise ConfigError("no evaluation file: it has no eval: datasets:")
    defaults = _table(found.get("defaults") or {}, "defaults")
    _require_known(found, "eval" if "eval" in document else "", _OF_EVAL)
    if "delegate" in found:
        say("delegate has no counterpart and is left out")
    lines = ["[evaluation]"]
    if every := found.get("eval_interval"):
        lines.append(f"every_steps = {_text(every, 'eval_interval')}")
    names = set[str]()
    for name, table in _datasets(found["datasets"]):
        if (ours := _name(name)) in names:
            raise ConfigError(f"datasets: {name}: {ours!r} is the name of another data set here; rename one")
        names.add(ours)
        lines += ["", *_dataset(name, {**defaults, **table}, say=lambda text, name=name: say(f"{name}: {text}"))]  # type: ignore[misc]
    return "\n".join(lines) + "\n"


def _datasets(found: Any) -> list[tuple[str, Mapping[str, Any]]]:
    if isinstance(found, Mapping):
        named = [(str(name), _table(table, str(name))) for name, table in found.items()]
        return [(name, {**table, "name": name}) for name, table in named]
    if not isinstance(found, list):
        raise ConfigError("datasets: must be a list or a table of data sets")
    tables = [_table(table, "datasets") for table in found]
    return [(str(table.get("name", "")), table) for table in tables]


def _table(found: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(found, Mapping):
        raise ConfigError(f"{where}: must be a table, got {found!r}")
    return found


def _require_known(table: Mapping[str, Any], where: str, known: Iterable[str]) -> None:
    """Raise ConfigError for an unknown key."""
    known = tuple(known)
    for key in map(str, table):
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"slime and Miles have {', '.join(known)}"
            raise ConfigError(f"{where}: unknown key {key!r}; {hint}" if where else f"unknown key {key!r}; {hint}")


def _dataset(name: str, table: Mapping[str, Any], *, say: Callable[[str], None]) -> list[str]:
    for key in ("name", "path"):
        if not isinstance(table.get(key), str) or not table[key]:
            raise ConfigError(f"datasets: {name or 'one'} has no {key}")
    _require_known(table, f"datasets: {name}", (*_KEYS, "rm_type", *_REMEDIES, *_AS_HERE))
    made: dict[str, Any] = {}
    hides_special = False
    for theirs, value in table.items():
        if value is None or theirs == "rm_type":
            continue
        if theirs in _AS_HERE:
            if theirs == "skip_special_tokens" and value:
                hides_special = True
            elif value != _AS_HERE[theirs]:
                say(f"{theirs} = {_text(value, theirs)} is left out: an answer is every token that was sampled")
            continue
        if theirs in _REMEDIES:
            say(f"{theirs} has no counterpart and is left out: {_REMEDIES[theirs]}")
            continue
        made[_KEYS[theirs]] = value
    made["name"] = _name(name)
    if made["name"] != name:
        say(f"is called {made['name']} here: the name is part of its metrics'")
    if variable := _VARIABLE.search(made["path"]):
        say(f"path has the variable {variable[0]}; write its value in")
    if made.get("top_k") == -1:
        made["top_k"] = 0
    for key in ("stop", "stop_token_ids"):
        if key in made and not isinstance(made[key], list):
            made[key] = [made[key]]
    lines = [
        "[[evaluation.datasets]]",
        *(f"{key} = {_text(value, f'datasets: {name}: {key}')}" for key, value in made.items()),
    ]
    kind = str(table.get("rm_type") or "")
    if kind in _REWARDS:
        plain = {"keep_special_tokens": False} if hides_special else {}
        lines.append(f"reward = {toml_text({**_REWARDS[kind], **plain})}")
        return lines
    if hides_special:
        say("skip_special_tokens is left out: it is reward = {keep_special_tokens = false} here, with a reward")
    if kind:
        say(f'rm_type {kind!r} has no counterpart: name a reward of your own, reward = {{kind = "package.module:f"}}')
    return lines


def _name(theirs: str) -> str:
    return re.sub("[^A-Za-z0-9_-]", "-", theirs)


def _text(value: Any, where: str) -> str:
    """Return a value as TOML. Raises ConfigError for what YAML has and TOML or JSON has not, such as a key 1."""
    try:
        return toml_text(value)
    except (TypeError, ValueError, RecursionError):
        raise ConfigError(f"{where}: must be of texts, numbers, lists and tables, got {value!r:.60}") from None
