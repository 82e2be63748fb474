"""Converts a TOML table to a frozen dataclass. Checks every key and type; errors name the section and the key."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import types
import typing
from collections.abc import Callable, Mapping
from datetime import date, time
from typing import Annotated, Any, Final, Literal, TypeVar

from asyncrl.config.secret_values import HIDDEN, hide_secrets
from asyncrl.errors import ConfigError

T = TypeVar("T")

_LARGEST_FLOAT32: Final = 3.4e38
"""Limit of the float32 values with which torch and kernels compute."""
_LONGEST_SECONDS: Final = 1e9
"""About thirty years; nats-server counts nanoseconds in 64 bits."""

_OF_OTHERS: Final = {
    "lr": "learning_rate",
    "batch_size": "groups_per_batch",
    "train_batch_size": "groups_per_batch",
    "n": "group_size",
    "num_generations": "group_size",
    "max_tokens": "max_new_tokens",
    "max_completion_length": "max_new_tokens",
    "max_response_length": "max_new_tokens",
    "max_prompt_length": "max_prompt_tokens",
}
"""Names in TRL and verl -> the key, in the section that has it. docs/start/from_trl_and_verl.md has all."""

hints_of: Callable[[type], Mapping[str, Any]] = functools.cache(
    functools.partial(typing.get_type_hints, include_extras=True)
)
"""Kept, as each annotation is text that Python would compile anew: half of the time of reading a run file."""


def build(kind: type[T], table: Mapping[str, Any], where: str) -> T:
    """Build a ``kind`` from ``table``.

    Raises ConfigError naming ``where`` and the key for an unknown key or a wrong type.
    """
    hints = hints_of(kind)
    for key in table:
        if key not in hints:
            meant = _OF_OTHERS.get(key)
            near = [meant] if meant in hints else difflib.get_close_matches(key, hints, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(hints)}"
            raise ConfigError(f"{where}: unknown key {key!r}; {hint}")
    missing = [
        f.name
        for f in dataclasses.fields(kind)  # type: ignore[arg-type]
        if f.default is f.default_factory is dataclasses.MISSING and f.name not in table
    ]
    if missing:
        raise ConfigError(f"{where}: missing {', '.join(missing)}")
    try:
        return kind(**{key: _value(value, hints[key], where, key) for key, value in table.items()})
    except ConfigError as error:
        raise error if str(error).startswith(where) else ConfigError(f"{where}: {error}") from None


def _value(value: Any, hint: Any, where: str, key: str) -> Any:
    """Convert ``value`` to ``hint``, with the few conversions that TOML needs (int to float, list to tuple)."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        made = _value(value, arguments[0], where, key)
        for allowed in arguments[1:]:
            _require_type(made in allowed, where, key, str(allowed), value, is_number=True)
        return made
    if dataclasses.is_dataclass(hint):
        _require_type(isinstance(value, dict), where, key, "a table", value)
        return build(typing.cast(type, hint), value, f"{where}: {key}")
    if origin is Literal:
        if value not in arguments:
            known = ", ".join(repr(option) for option in arguments if option != "")
            raise ConfigError(f"{where}: {key} must be one of {known}, got {value!r}")
        return value
    if origin is tuple:
        _require_type(isinstance(value, list), where, key, "a list", value, is_number=_is_number(arguments[0]))
        return tuple(
            _value(item, arguments[0], where, _item_path(key, item, place)) for place, item in enumerate(value, 1)
        )
    if origin in (typing.Union, types.UnionType):
        words = [word for one in arguments if typing.get_origin(one) is Literal for word in typing.get_args(one)]
        kind = next(one for one in arguments if one is not type(None))
        if words and type(value) is not kind:
            expected = " or ".join((_TOML_NAMES.get(kind, kind.__name__), *(f'"{word}"' for word in words)))
            _require_type(value in words, where, key, expected, value, is_number=kind in _NUMBERS)
            return value
        return _value(value, kind, where, key)
    if origin is not None and issubclass(origin, Mapping):
        _require_type(isinstance(value, dict), where, key, "a table", value)
        if dataclasses.is_dataclass(arguments[-1]):
            return {name: _value(one, arguments[-1], where, f"{key}: {name}") for name, one in value.items()}
        _require_storable(value, where, key)
        return value
    if hint is float:
        is_right = isinstance(value, int | float) and not isinstance(value, bool)
        _require_type(is_right, where, key, "a number", value, is_number=True)
        _require_type(math.isfinite(value), where, key, "finite", value)
        _require_type(abs(value) <= _LARGEST_FLOAT32, where, key, "within float32, at most 3.4e38", value)
        _require_type(abs(value) <= _LONGEST_SECONDS or not key.endswith("_seconds"), where, key, "at most 1e9", value)
        return float(value)
    if isinstance(hint, type):
        expected = _TOML_NAMES.get(hint, hint.__name__)
        _require_type(type(value) is hint, where, key, expected, value, is_number=hint in _NUMBERS)
        if type(value) is str:  # paths cannot contain NUL, and texts are passed to programs as C strings
            _require_type("\0" not in value, where, key, "text without NUL characters", value)
        if type(value) is int:
            _require_storable(value, where, key)
    return value


def _require_storable(value: Any, where: str, key: str) -> None:
    """Raise ConfigError if TOML can write ``value`` but the run's records and messages cannot, at any depth."""
    if isinstance(value, dict):
        for name, item in value.items():
            _require_storable(item, where, f"{key}.{name}")
    elif isinstance(value, list):
        for item in value:
            _require_storable(item, where, key)
    elif isinstance(value, date | time):
        raise ConfigError(f"{where}: {key} is a date or a time, which no message can carry; write it in quotes")
    elif type(value) is int:  # TOML's range is 64 bits; Python reads larger numbers
        _require_type(-(2**63) <= value < 2**63, where, key, "a whole number of 64 bits", value)


def _item_path(key: str, item: Any, place: int) -> str:
    """``key`` with the table of the list that is meant: its name, or its position counted from 1."""
    if not isinstance(item, dict):
        return key
    name = item.get("name")
    return f"{key}: {name if isinstance(name, str) and name else place}"


_NUMBERS = (int, float, bool)


def _is_number(hint: Any) -> bool:
    return (typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint) in _NUMBERS


_TOML_NAMES = {int: "a whole number", str: "a string", bool: "true or false"}


def _require_type(condition: bool, where: str, key: str, expected: str, value: Any, *, is_number: bool = False) -> None:
    """``is_number``: the key takes numbers, so it holds no secret, whatever it is called ("stop_token_ids")"""
    if not condition:
        # Compared as text, because nan is not equal to itself.
        without = repr(hide_secrets(value, key="" if is_number else key))
        is_secret = key in ("token", "url", "address") or without != repr(value)
        shown = HIDDEN if is_secret else repr(value)
        raise ConfigError(f"{where}: {key} must be {expected}, got {shown}")
