"""The base class of an algorithm's components: a frozen dataclass whose fields are its options.

``formula`` computes the result. Its parameter names say what the component needs from the batch and from other models.

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Cispo(Loss):
        name = "cispo"
        clip_high: Positive = 4.0

        def formula(self, logprobs, behavior_logprobs, advantages): ...

An option is either a number with a range (``Cap``, ``Positive``, ...: a float annotated with a ``Range``) or one of
several words (a ``Literal``). The run file sets options in [algorithm.options].
"""

from __future__ import annotations

import difflib
import inspect
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, ClassVar, Final, Literal, Self, TypeVar

from asyncrl.config import plugins
from asyncrl.config.checks import Range
from asyncrl.config.tables import hints_of
from asyncrl.errors import ConfigError

FRESH: Final = " (the ratio of a fresh token is 1)"

Positive = Annotated[float, Range(low=0.0, is_open=True, is_finite=True)]
NonNegative = Annotated[float, Range(low=0.0, is_finite=True)]
Share = Annotated[float, Range(low=0.0, high=1.0)]
Number = Annotated[float, Range(low=-math.inf)]
ClipWidth = Annotated[float, Range(low=0.0)]
"""How far a ratio may move from 1."""
Cap = Annotated[float, Range(low=1.0, why=FRESH)]
"""Upper bound of a ratio."""
Floor = Annotated[float, Range(low=0.0, high=1.0, why=FRESH)]
"""Lower bound of a ratio."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """Base of Advantage, Loss, Correction and Aggregation.

    name    name of the component in the run file
    paper   where the component comes from
    inputs  names of the parameters of ``formula``, in order
    """

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    inputs: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        cls.name = cls.__dict__.get("name") or cls.__name__
        cls.inputs = tuple(inspect.signature(cls.formula).parameters)[1:]

    def formula(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the result of the component. Each kind of component documents its inputs and outputs."""
        raise NotImplementedError(f"{type(self).__name__} defines no formula")

    @property
    def options(self) -> dict[str, Any]:
        """The values of the options, by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def defaults_for(cls, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return defaults that depend on other options: the meaning of a number may depend on a word."""
        return {}

    def problem(self) -> str:
        """Return what is wrong with the combination of options, in a few words; empty if nothing is."""
        return ""

    def with_options(self, changes: Mapping[str, Any]) -> Self:
        """Return a copy with other options. Raises ConfigError for a value of the wrong type, but checks no ranges."""
        typed = {key: _typed(value, hints_of(type(self))[key], key) for key, value in changes.items()}
        return replace(self, **{**self.defaults_for(typed), **typed})

    def check(self) -> None:
        """Raise ConfigError for the first option that is out of range."""
        hints = hints_of(type(self))
        for option, value in self.options.items():
            _typed(value, hints[option], f"{option} of {self.name}")
            allowed = allowed_range(type(self), option)
            if allowed is not None and value not in allowed:
                raise ConfigError(f"algorithm.options: {option} of {self.name} must be {allowed}, got {value:g}")
        if problem := self.problem():
            raise ConfigError(f"algorithm.options: {problem}")


def allowed_range(kind: type[Component], option: str) -> Range | None:
    """Return the range of a numeric option of ``kind``; None if the option is a word."""
    found = [item for item in getattr(hints_of(kind)[option], "__metadata__", ()) if isinstance(item, Range)]
    return found[0] if found else None


def _typed(value: Any, hint: Any, key: str) -> Any:
    """Return ``value`` as the field stores it: one of the allowed words, or a float."""
    if typing.get_origin(hint) is Literal:
        words = typing.get_args(hint)
        if value not in words:
            raise ConfigError(f"algorithm.options: {key} must be one of {', '.join(words)}, got {value!r}")
        return value
    if not isinstance(value, int | float) or isinstance(value, bool) or value != value:
        raise ConfigError(f"algorithm.options: {key} must be a number, got {value!r}")
    return float(value)


P = TypeVar("P", bound=Component)


def load_class(name: str, table: Mapping[str, type[P] | str]) -> type[P]:
    """Return the class in the row ``name`` of a table, which holds it or its address "package.module:Class"."""
    entry = table[name]
    found: type[P] = plugins.load(entry, where=name, kind=type) if isinstance(entry, str) else entry
    return found


def named(name: str, kind: type[P], table: Mapping[str, type[P] | str], *, where: str) -> P:
    """Return the component called ``name``, with its default options.

    ``where`` is its key in [algorithm]. Raises ConfigError for an unknown name and suggests the closest known name.
    """
    if name in table:
        return load_class(name, table)()
    if ":" not in name:
        near = difflib.get_close_matches(name, table, 1) or [known for known in table if known.startswith(f"{name}_")]
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"algorithm: {where} must be one of {', '.join(table)}, got {name!r}{hint}")
    found = plugins.load(name, where=f"algorithm.{where}", kind=type)
    if not issubclass(found, kind):
        raise ConfigError(f"algorithm.{where}: {name!r} must derive from {kind.__module__}.{kind.__name__}")
    if "__dataclass_fields__" not in vars(found):
        raise ConfigError(
            f"algorithm.{where}: {name!r} must be a dataclass: put @dataclass(frozen=True, slots=True, kw_only=True) "
            "above it"
        )
    try:
        component: P = found()
    except TypeError as error:
        raise ConfigError(f"algorithm.{where}: {name!r} needs a default for every option ({error})") from error
    return component
