"""Loads rollout.function of the run file: an ``async`` function, or a class of which each worker makes one object.

RolloutFn (protocols/functions.py) says what it must look like; that is checked before anything starts.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar, cast

from asyncrl import config
from asyncrl.config import plugins, tables
from asyncrl.errors import ConfigError
from asyncrl.protocols import RolloutFn, Tokenizer

FUNCTIONS: Final = {
    "single_turn": "asyncrl.rollouts.builtin:single_turn",
    "given": "asyncrl.rollouts.builtin:given",
    "agent": "asyncrl.rollouts.agent.function:Agent",
}

F = TypeVar("F", bound=Callable[..., Any])

_ARGUMENTS: Final[tuple[str, ...]] = ("prompt", "generate", "*", "index")


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What a rollout function, or its class, says of itself by attributes of these names (RolloutFn)."""

    samples: bool = True
    gives_one: bool = False
    runs_programs: bool = False


def described(*, samples: bool = True, gives_one: bool = False) -> Callable[[F], F]:
    """Decorates a rollout function with its traits."""

    def describe(function: F) -> F:
        vars(function).update(samples=samples, gives_one=gives_one)
        return function

    return describe


def traits(name: str) -> Traits:
    """Of a function that is not on this machine, which need not be with the learner, as if it said nothing."""
    try:
        found = plugins.load(name, where="rollout.function", table=FUNCTIONS)
    except ConfigError:  # who calls it says so
        return Traits()
    names = (field.name for field in dataclasses.fields(Traits))
    return Traits(**{name: getattr(found, name) for name in names if hasattr(found, name)})


def load_rollout(section: config.RolloutSection) -> Callable[[Tokenizer], RolloutFn]:
    """A function from a tokenizer to the run file's RolloutFn. Both may raise ConfigError.

    `asyncrl check` has no tokenizer and calls only this.
    """
    name = section.function
    found = plugins.load(name, where="rollout.function", table=FUNCTIONS)
    _check_call(found, name)
    if not inspect.isclass(found):
        _refuse_options(section)
        return lambda tokenizer: found
    options_type = getattr(sys.modules[found.__module__], "Options", None)
    if options_type is None:
        _refuse_options(section)
    arguments = () if options_type is None else (tables.build(options_type, section.options, "rollout.options"),)
    _check_made(found, name, has_options=bool(arguments))
    return lambda tokenizer: cast(
        RolloutFn, plugins.make(found, tokenizer, *arguments, where="rollout.function", name=name)
    )


def check_machine(section: config.RolloutSection) -> None:
    """What this machine lacks for the function, such as an agent's program: its Options' ``check_machine`` says it.

    Raises ConfigError.
    """
    options = load_options(section)
    if hasattr(options, "check_machine"):
        options.check_machine()


def load_options(section: config.RolloutSection) -> Any:
    """[rollout.options] as the Options beside the function's class; None for one without. Raises ConfigError."""
    found = plugins.load(section.function, where="rollout.function", table=FUNCTIONS)
    options_type = getattr(sys.modules[found.__module__], "Options", None) if inspect.isclass(found) else None
    return None if options_type is None else tables.build(options_type, section.options, "rollout.options")


def _refuse_options(section: config.RolloutSection) -> None:
    if section.options:
        raise ConfigError(
            f"rollout.options: {section.function!r} takes no options, got {', '.join(section.options)}; a class with "
            "an Options beside it does"
        )


def _check_call(found: Any, name: str) -> None:
    """Raises ConfigError unless ``found``, or an object of it if it is a class, can be awaited as RolloutFn says."""
    call, what, arguments = found, name.rpartition(":")[2], _ARGUMENTS
    is_class = inspect.isclass(found)
    method = (found if is_class else type(found)).__call__
    if is_class or inspect.isfunction(method):
        call, what, arguments = method, "__call__", ("self", *_ARGUMENTS)
    wanted = f"rollout.function: {name!r} must be async def {what}({', '.join(arguments)})"
    if is_class and not inspect.isfunction(method):
        raise ConfigError(f"{wanted}, it is a class without __call__")
    signature = _signature(call, name)
    if not _takes(signature, *arguments[: arguments.index("*")], index=0):
        raise ConfigError(f"{wanted}, it takes {_shown(signature)}")
    if not inspect.iscoroutinefunction(inspect.unwrap(call)):
        raise ConfigError(f"{wanted}, it is not async")


def _check_made(kind: type, name: str, *, has_options: bool) -> None:
    arguments = ("tokenizer", "options") if has_options else ("tokenizer",)
    signature = _signature(kind, name)
    if not _takes(signature, *arguments):
        raise ConfigError(
            f"rollout.function: {name!r} is made with ({', '.join(arguments)}), as its module has "
            f"{'an' if has_options else 'no'} Options, it takes {_shown(signature)}"
        )


def _signature(function: Callable[..., Any], name: str) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        raise ConfigError(f"rollout.function: {name!r} has no readable signature; write a Python function") from None


def _takes(signature: inspect.Signature, *positional: Any, **named: Any) -> bool:
    try:
        signature.bind(*positional, **named)
    except TypeError:
        return False
    return True


def _shown(signature: inspect.Signature) -> str:
    """The signature without its types."""
    parameters = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))
