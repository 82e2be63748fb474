"""Decides which settings from the bus a joining machine accepts, since another machine wrote them.

1. Keys that no worker needs are left out, and so are keys that say where this machine keeps its files or who it is.
2. Code may be imported only if asyncrl ships it or `--allow` names it. Servers may be contacted only if `--allow` names
   them.
3. Adapters refuse options that could do more than set a size or a method (``Adapter.check_joined``). So do rewards
   (``own_options``, such as a sandbox) and rollout functions (``runs_programs``).

Settings that this machine's own command passes with --set are not foreign. Nothing is imported before rule 2 is
checked.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from asyncrl.adapters import registry
from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError

_EVERY_KEY: Final = ("*",)
_TAKEN: Final[Mapping[str, tuple[str, ...]]] = {
    "run": ("seed", "steps", "mode", "restarts", "stall_seconds"),
    "bus": ("kind", "store", "max_message_bytes", "max_group_bytes", "max_log_bytes", "ack_seconds"),
    "model": _EVERY_KEY,
    "data": ("max_prompt_tokens", "reward_key"),
    "rollout": _EVERY_KEY,
    "engine": _EVERY_KEY,
    "reward": _EVERY_KEY,
    "learner": ("groups_per_batch",),
    "staleness": _EVERY_KEY,
    "weights": ("channel", "options", "directory", "keep", "every_steps"),
    "checkpoint": ("every_steps", "keep_log"),
    "evaluation": ("place", "datasets"),
}
_CODE: Final = ("bus.kind", "engine.kind", "reward.kind", "reward.rows", "rollout.function", "weights.channel")
"""Keys of ``_TAKEN`` that plugins.load reads; tests/unit/cli/test_foreign_settings.py checks that the list is
complete."""
_TABLES: Final = ("reward.rows",)
"""Keys of ``_CODE`` whose value is a table of names."""
_ASKED: Final = ("engine.options.url", "reward.options.url")
_DATASETS: Final = "evaluation.datasets"
"""Each data set may have a reward like [reward]. Its keys are checked too, as are those of a reward's parts."""
_OF_DATASETS: Final = (*_DATASETS.split("."), "reward")
_OWN: Final = "asyncrl"
_PLAIN_URL: Final = re.compile(r"(https?)://([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?(/[\x21-\x5b\x5d-\x7e]*)?")


@dataclass(frozen=True, slots=True)
class Allowed:
    """Names given with `--allow`: packages and modules ("my_rewards.math"), and servers ("http://HOST:PORT")."""

    modules: tuple[str, ...] = ()
    servers: tuple[str, ...] = ()

    @classmethod
    def of(cls, names: Sequence[str]) -> Allowed:
        """Parse the names. Raises ConfigError."""
        modules = tuple(name for name in names if all(part.isidentifier() for part in name.split(".")))
        servers = {name: _server(name) for name in names if name not in modules}
        for name, server in servers.items():
            if not server:
                raise ConfigError(
                    f"--allow {name}: write a package or a module, such as my_rewards or my_rewards.math, or a server, "
                    "http://HOST:PORT"
                )
        return cls(modules, tuple(servers.values()))

    def has_module(self, module: str) -> bool:
        return any(module == one or module.startswith(f"{one}.") for one in (_OWN, *self.modules))


def taken(sections: Mapping[str, Any], *, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the settings that this machine accepts from the bus, without keys that its own ``overrides`` set.

    Raises ConfigError if a section is not a table.
    """
    table: dict[str, Any] = {}
    for name, keys in _TAKEN.items():
        if name not in sections:
            continue
        section = sections[name]
        if not isinstance(section, dict):
            raise ConfigError(f"the run's settings: {name} must be a table, is {_short(repr(section))}")
        table[name] = {key: value for key, value in section.items() if keys is _EVERY_KEY or key in keys}
    table = copy.deepcopy(table)
    for item in overrides:
        *parents, key = item.partition("=")[0].split(".")
        node: Any = table
        for parent in parents:
            node = node.get(parent) if isinstance(node, dict) else None
        if isinstance(node, dict):
            node.pop(key, None)
    return table


def check_code(table: Mapping[str, Any], allowed: Allowed) -> None:
    """Refuse code and servers that the settings name but this machine does not allow. Raises ConfigError."""
    for key, name in _values(table, _CODE):
        module, colon, _ = name.partition(":")
        if colon and not allowed.has_module(module):
            named = f"--allow {module}" if all(p.isidentifier() for p in module.split(".")) else "the module's name"
            raise ConfigError(
                f"{key}: the run's settings name {_short(name)}, code that this machine's command does not allow; "
                f"if you trust it: {named}"
            )
    for key, url in _values(table, _ASKED):
        server = _server(url)
        if url and (not server or server not in allowed.servers):
            named = f": --allow {server}" if server else f": --set {key}=URL"
            raise ConfigError(
                f"{key}: the run's settings name {_short(url)}, a server that this machine's command does not allow; "
                f"if it may be asked{named}"
            )


def check_options(table: Mapping[str, Any], run: RunConfig) -> None:
    """Refuse options that an adapter accepts only from this machine's own command. Raises ConfigError."""
    for section, adapter in (("engine", registry.engine_class(run)), ("weights", registry.channel_class(run))):
        options = table.get(section, {}).get("options", {})
        adapter.check_joined(options)
    if table.get("rollout", {}).get("options") and registry.rollout_runs_programs(run):
        raise ConfigError(
            "rollout.options: the run's settings say which programs to run, which only this machine's command may: "
            "--set rollout.options=..."
        )
    for where, reward in _rewards(table):
        options = reward.get("options") or {}
        for key in registry.reward_own_options(reward["kind"]) if options and "kind" in reward else ():
            if key in options:
                raise ConfigError(
                    f"{where}.options.{key}: the run's settings say {_short(str(options[key]))}, and what programs may "
                    f"do on this machine its own command says: --set {_own(where)}.options.{key}=VALUE"
                )


def _rewards(table: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the run's reward, the rewards of data sets, and the parts of each."""
    for where, value in (("reward", table.get("reward")), *((_DATASETS, one) for one in _under(table, _OF_DATASETS))):
        if isinstance(value, dict):
            where = where if where == "reward" else f"{where}.reward"
            parts = value.get("parts")
            yield where, value
            for name, part in parts.items() if isinstance(parts, dict) else ():
                if isinstance(part, dict):
                    yield f"{where}.parts.{name}", part


def is_shared_folder(run: RunConfig) -> bool:
    """Whether weights.directory is a folder from which workers read what the learner writes, not one to write to."""
    return "weights.directory" in registry.channel_class(run).required_paths(run)


def _own(where: str) -> str:
    """Key under which this machine's command sets the options of this reward."""
    return where.removeprefix(f"{_DATASETS}.")


def _values(table: Mapping[str, Any], keys: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the text values of ``keys``. Values of other types are refused by the types of the run file."""
    for key in keys:
        section, _, rest = key.partition(".")
        places = _rewards(table) if section == "reward" else [(section, table.get(section))]
        for where, place in places:
            for value in _under(place, rest.split(".")):
                for one in value.values() if key in _TABLES and isinstance(value, dict) else (value,):
                    if isinstance(one, str):
                        yield f"{where}.{rest}", one


def _under(value: Any, parts: Sequence[str]) -> Iterator[Any]:
    """Yield the values at the path ``parts``, in each table of a list."""
    if isinstance(value, list | tuple):
        for one in value:
            yield from _under(one, parts)
    elif not parts:
        yield value
    elif isinstance(value, dict):
        yield from _under(value.get(parts[0]), parts[1:])


def _server(url: str) -> str:
    """Return scheme, host and port of a plain address; empty if two programs might parse it differently."""
    if not _PLAIN_URL.fullmatch(url):
        return ""
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        return ""
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return f"{parts.scheme}://{host}:{port}"


def _short(text: str) -> str:
    return repr(text if len(text) <= 100 else text[:97] + "...")
