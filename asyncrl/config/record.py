"""Convert a run's settings to a table for its history, and back.

The table has what a later reader of the run's folder needs.

Paths are absolute, so that the folder can be read from anywhere. Left out are sections that may hold secrets and are
not needed later ([reward], [engine], [metrics], [weights], [rollout.options]) and the bus's token. Files with secrets
are recorded by name. ``worker_table`` has more, for workers that join.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from asyncrl.config import RunConfig, run_file
from asyncrl.config.addresses import without_secrets
from asyncrl.config.secret_values import hidden

_SECTIONS: Final = (
    *("run", "model", "data", "rollout", "learner", "algorithm", "critic", "reference", "teacher"),
    *("curriculum", "staleness", "checkpoint", "evaluation", "bus"),
)
_WITH_PATH: Final = ("model", "data", "critic", "reference", "teacher")
_BUS_PATHS: Final = ("credentials", "tls_ca", "tls_certificate", "tls_key")
_BUS_SIZES: Final = ("max_message_bytes", "max_group_bytes", "max_log_bytes")
_BUS_KEYS: Final = ("kind", "url", "store", *_BUS_SIZES, "ack_seconds", *_BUS_PATHS)


def as_table(run: RunConfig) -> dict[str, Any]:
    """Return ``_SECTIONS`` as JSON values."""
    table: dict[str, Any] = {}
    for name in _SECTIONS:
        if (section := getattr(run, name)) is not None:
            table[name] = json.loads(json.dumps(dataclasses.asdict(section)))
            if "options" in table[name]:
                table[name]["options"] = hidden(table[name]["options"])
    for name in _WITH_PATH:
        if table.get(name, {}).get("path"):
            table[name]["path"] = str(Path(table[name]["path"]).absolute())
    table["evaluation"]["datasets"] = [_dataset(one) for one in table["evaluation"]["datasets"]]
    for file in table["data"]["files"]:
        file["path"] = str(Path(file["path"]).absolute())
    table["bus"] = {key: table["bus"][key] for key in _BUS_KEYS}
    for key in _BUS_PATHS:
        if table["bus"][key]:
            table["bus"][key] = str(Path(table["bus"][key]).absolute())
    table["bus"]["url"] = without_secrets(table["bus"]["url"])
    table["rollout"].pop("options")
    return table


def _dataset(table: dict[str, Any]) -> dict[str, Any]:
    reward = {"reward": hidden(table["reward"])} if table["reward"] is not None else {}
    kept = {key: value for key, value in table.items() if key != "reward"}
    return kept | reward | {"path": str(Path(table["path"]).absolute())}


def worker_table(run: RunConfig) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the settings for a worker without a run file, and the keys withheld because they may hold secrets.

    Left out are options with a key such as "headers" or "api-key", options with an address that contains a password,
    and all options of a reward, engine or rollout function that is not asyncrl's own. If one part of a reward has such
    options, all parts are left out. So are run.directory and the paths of bus credentials and TLS files, because each
    worker has its own.
    """
    table = as_table(run) | {
        name: json.loads(json.dumps(dataclasses.asdict(getattr(run, name)))) for name in ("engine", "reward", "weights")
    }
    table["run"].pop("directory")
    table["evaluation"] = _shared_evaluation(run)
    for key in _BUS_PATHS:  # each worker has its own paths
        table["bus"].pop(key)
    if run.weights.directory:
        table["weights"]["directory"] = str(Path(run.weights.directory).absolute())
    table["rollout"]["options"] = json.loads(json.dumps(run.rollout.options))
    withheld = []
    for name, key in (("engine", "kind"), ("reward", "kind"), ("rollout", "function"), ("weights", "channel")):
        made = table[name]["options"]
        if made and (":" in table[name][key] or hidden(made) != made):
            table[name].pop("options")
            withheld.append(f"{name}.options")
    if not _may_be_shared(table["reward"]["parts"]):
        table["reward"].pop("parts")
        withheld.append("reward.parts")
    return table, tuple(withheld)


def _shared_evaluation(run: RunConfig) -> dict[str, Any]:
    """Return what a worker needs to evaluate in addition to its training: the rewards. The learner has the data sets.

    Empty if the options of a data set's reward may not be on the bus; a worker that joins then only trains.
    """
    datasets = []
    for one in run.evaluation.datasets if run.evaluation.place == "shared" else ():
        table: dict[str, Any] = {"name": one.name, "path": ""}
        if one.reward is not None:
            table["reward"] = json.loads(json.dumps(dataclasses.asdict(one.reward)))
            made = table["reward"]["options"]
            if made and (":" in one.reward.kind or hidden(made) != made):
                return {}
            if not _may_be_shared(table["reward"]["parts"]):
                return {}
        datasets.append(table)
    return {"place": "shared", "datasets": datasets} if datasets else {}


def _may_be_shared(parts: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether the options of all parts of a reward may be on the bus."""
    return all(not one["options"] or (":" not in one["kind"] and hidden(one) == one) for one in parts.values())


def from_table(table: Mapping[str, Any], *, where: str) -> RunConfig:
    """Inverse of ``as_table``; missing sections get their defaults. Raises ConfigError naming ``where``."""
    return run_file.from_table(table, where=where)
