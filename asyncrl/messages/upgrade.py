"""Translates data that older versions of asyncrl wrote: messages, metrics, lines of a history, checkpoints.

Recorded data of schema 1 is read, so that `asyncrl audit`, `replay`, `top` and ``--resume`` work on old runs. Running
processes must all have the same version. Heartbeats and weight versions carry the schema they were written with
(launch/checks/same_version.py), and requests and answers of another schema are rejected (``_LIVE``). Pure.

To rename a field, raise SCHEMA and add the old name to the table of the previous schema.
Tests: tests/unit/messages/test_upgrade.py, on data that the old code wrote (tests/data/v1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from asyncrl.config.renamed import translated
from asyncrl.errors import MessageError

SCHEMA: Final = 2
"""Schema of the messages that this version writes. Raise it when an older reader would misread a changed message."""

_SINCE_1: Final[Mapping[str, Mapping[str, str]]] = {
    "PromptGroup": {"run_epoch": "incarnation"},
    "VersionSpan": {"run_epoch": "incarnation"},
    "Progress": {"run_epoch": "incarnation", "groups_buried": "groups_failed"},
    "WeightVersion": {"run_epoch": "incarnation"},
    "Heartbeat": {"run_epoch": "incarnation"},
    "Quarantine": {"run_epoch": "incarnation"},
}
"""Message type -> field in schema 1 -> present name. Types without a row kept their fields."""

_LIVE: Final = {"TransferRequest", "TransferOffer"}
"""Types that are rejected in another schema."""

_METRICS: Final[Mapping[str, str]] = {
    "learner/run_epoch": "learner/incarnation",
    "learner/buried_in_a_row": "learner/failed_in_a_row",
    "staleness/buried_groups": "staleness/failed_groups",
    "bus/refused": "bus/rejected",
    "rollout/salvaged_tokens": "rollout/resumed_tokens",
}
"""Metric in schema 1 -> present name. Metrics under "rollout/" also exist for each worker, as rollout/WORKER/..."""

HISTORY: Final[Mapping[str, str]] = {"run_epoch": "incarnation"}
"""Key of a history line -> present name."""
FATES: Final[Mapping[str, str]] = {"buried": "failed"}
CHECKPOINT: Final[Mapping[str, str]] = {"run_epoch": "incarnation", "groups_buried": "groups_failed"}
"""Key of a checkpoint's learner.json in format 1 -> present name."""


def is_read(kind: str, *, schema: object) -> bool:
    """Whether a message of type ``kind`` and an older ``schema`` is upgraded on reading."""
    return type(schema) is int and schema == 1 and kind not in _LIVE


def fields(kind: str, old: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the fields of a schema 1 message of type ``kind`` by their present names. Raises MessageError."""
    made = renamed(old, _SINCE_1.get(kind, {}))
    if change := _VALUES.get(kind):
        change(made)
    return made


def renamed(table: Mapping[Any, Any], names: Mapping[str, str]) -> dict[Any, Any]:
    """Rename the keys of ``table`` that are in ``names``. Raises MessageError if it has a key under both names."""
    if both := [old for old, new in names.items() if old in table and new in table]:
        raise MessageError(f"has {both[0]!r} and {names[both[0]]!r}, which is its present name")
    return {names.get(key, key): value for key, value in table.items()}


def metrics(row: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a row of metrics by their present names. A row with present names is unchanged. Raises MessageError."""
    return renamed(row, {name: new for name in row if (new := _metric(name)) != name})


def _metric(name: Any) -> Any:
    if isinstance(name, str) and name.startswith("rollout/") and name.count("/") == 2:
        _, worker, last = name.split("/")
        return _METRICS.get(f"rollout/{last}", f"rollout/{last}").replace("/", f"/{worker}/")
    return _METRICS.get(name, name)


def _numbers(made: dict[Any, Any]) -> None:
    if isinstance(numbers := made.get("numbers"), dict):
        made["numbers"] = metrics(numbers)


def _schema(made: dict[Any, Any]) -> None:
    made["schema"] = 1


def _heartbeat(made: dict[Any, Any]) -> None:
    _numbers(made)
    _schema(made)


def _settings(made: dict[Any, Any]) -> None:
    if isinstance(sections := made.get("sections"), dict):
        made["sections"] = translated(sections)


_VALUES: Final[Mapping[str, Callable[[dict[Any, Any]], None]]] = {
    "StepMetrics": _numbers,
    "WeightVersion": _schema,
    "Heartbeat": _heartbeat,
    "RunSettings": _settings,
}
"""Changes inside the fields of a message type."""
