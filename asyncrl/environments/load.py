"""Load rollout.function of the run file: an ``async`` function, or a class that each worker instantiates once.

RolloutFn (environments/port.py) defines the required interface. The loader checks it before anything starts.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from asyncrl import config
from asyncrl.config import plugins, tables
from asyncrl.environments.port import RolloutFn, Tokenizer
from asyncrl.environments.whole_group import WholeGroup
from asyncrl.errors import ConfigError

FUNCTIONS: Final = {
    "single_turn": "asyncrl.environments.builtin:single_turn",
    "given": "asyncrl.environments.builtin:given",
    "idle": "asyncrl.environments.builtin:idle",
    "agent": "asyncrl.environments.agent.function:Agent",
}

F = TypeVar("F", bound=Callable[..., Any])

_ARGUMENTS: Final[tuple[str, ...]] = ("prompt", "generate", "*", "index")
_GROUP_ARGUMENTS: Final[tuple[str, ...]] = ("prompt", "generates")


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """Attributes that a rollout function or its class may set to describe itself; RolloutFn explains each."""

    samples: bool = True
    gives_one: bool = False
    makes_groups: bool = False


def describe_rollout(*, samples: bool = True, gives_one: bool = False) -> Callable[[F], F]:
    """Decorate a rollout function with its traits."""

    def describe(function: F) -> F:
        vars(function).update(samples=samples, gives_one=gives_one)
        return function

    return describe


def traits(name: str) -> Traits:
    """Return the traits of a rollout function; the defaults if this machine cannot import it.

    The learner's machine need not have the function.
    """
    try:
        found = plugins.load(name, where="rollout.function", table=FUNCTIONS)
    except ConfigError:  # code that calls the function reports the error
        return Traits()
    names = (field.name for field in dataclasses.fields(Traits))
    return Traits(**{name: getattr(found, name) for name in names if hasattr(found, name)})


def load_rollout(section: config.RolloutSection) -> Callable[[Tokenizer], RolloutFn]:
    """Return a factory that makes the run file's RolloutFn from a tokenizer. Both may raise ConfigError.

    `asyncrl check` has no tokenizer, so it calls load_rollout but not the factory.
    """
    name = section.function
    found = plugins.load(name, where="rollout.function", table=FUNCTIONS)
    makes_groups = traits(name).makes_groups
    _check_call(found, name, _GROUP_ARGUMENTS if makes_groups else _ARGUMENTS)
    if not inspect.isclass(found):
        _refuse_options(section)
        return lambda tokenizer: WholeGroup(found) if makes_groups else found
    options_type = getattr(sys.modules[found.__module__], "Options", None)
    if options_type is None:
        _refuse_options(section)
    arguments = () if options_type is None else (tables.build(options_type, section.options, "rollout.options"),)
    _check_constructor(found, name, has_options=bool(arguments))

    def make(tokenizer: Tokenizer) -> RolloutFn:
        made = plugins.make(found, tokenizer, *arguments, where="rollout.function", name=name)
        return WholeGroup(made) if makes_groups else cast(RolloutFn, made)

    return make


def own_sections(run: config.RunConfig, *, of_evaluation: bool) -> dict[str, config.RolloutSection]:
    """Return [rollout] for each data set with a function of its own: data.files, or evaluation.datasets."""
    files = [(file.name or Path(file.path).name, file) for file in run.data.files]
    sets = [(dataset.name, dataset) for dataset in run.evaluation.datasets]
    named: list[tuple[str, config.DataFile | config.EvaluationDataset]] = [*sets] if of_evaluation else [*files]
    return {
        name: dataclasses.replace(run.rollout, function=one.function, options=one.options)
        for name, one in named
        if one.function
    }


def load_own_rollouts(run: config.RunConfig, tokenizer: Tokenizer, *, of_evaluation: bool) -> dict[str, RolloutFn]:
    """Return the function of each data set that has its own. Raises ConfigError."""
    sections = own_sections(run, of_evaluation=of_evaluation)
    return {name: load_rollout(section)(tokenizer) for name, section in sections.items()}


def gives_one(run: config.RunConfig, *, of_evaluation: bool = False) -> bool:
    """Return whether every rollout function of training, or of training and evaluation, gives one trajectory."""
    own = own_sections(run, of_evaluation=False) | (own_sections(run, of_evaluation=True) if of_evaluation else {})
    return all(traits(section.function).gives_one for section in (run.rollout, *own.values()))


def check_machine(section: config.RolloutSection) -> None:
    """Raise ConfigError if this machine lacks something that the function needs, such as an agent's program.

    Calls ``check_machine`` of the function's Options, if it has one.
    """
    options = load_options(section)
    if hasattr(options, "check_machine"):
        options.check_machine()


def load_options(section: config.RolloutSection) -> Any:
    """Build the function's Options from [rollout.options]; None if its module has no Options. Raises ConfigError."""
    found = plugins.load(section.function, where="rollout.function", table=FUNCTIONS)
    options_type = getattr(sys.modules[found.__module__], "Options", None) if inspect.isclass(found) else None
    return None if options_type is None else tables.build(options_type, section.options, "rollout.options")


def sets_no_reward(section: config.RolloutSection) -> bool:
    """Return whether the function's options say that it sets no reward. Raises ConfigError."""
    return getattr(load_options(section), "sets_no_reward", False)


def _refuse_options(section: config.RolloutSection) -> None:
    if section.options:
        raise ConfigError(
            f"rollout.options: {section.function!r} takes no options, got {', '.join(section.options)}; only a class "
            "with an Options in its module does"
        )


def _check_call(found: Any, name: str, wanted_arguments: tuple[str, ...]) -> None:
    """Raise ConfigError unless ``found``, or an instance of it if it is a class, can be called as a RolloutFn."""
    call, what, arguments = found, name.rpartition(":")[2], wanted_arguments
    is_class = inspect.isclass(found)
    method = (found if is_class else type(found)).__call__
    if is_class or inspect.isfunction(method):
        call, what, arguments = method, "__call__", ("self", *wanted_arguments)
    wanted = f"rollout.function: {name!r} must be async def {what}({', '.join(arguments)})"
    if is_class and not inspect.isfunction(method):
        raise ConfigError(f"{wanted}, it is a class without __call__")
    signature = _signature(call, name)
    positional, _, named = " ".join(arguments).partition(" * ")
    if not _takes(signature, *positional.split(), **dict.fromkeys(named.split())):
        raise ConfigError(f"{wanted}, it takes {_show(signature)}")
    if not inspect.iscoroutinefunction(inspect.unwrap(call)):
        raise ConfigError(f"{wanted}, it is not async")


def _check_constructor(kind: type, name: str, *, has_options: bool) -> None:
    arguments = ("tokenizer", "options") if has_options else ("tokenizer",)
    signature = _signature(kind, name)
    if not _takes(signature, *arguments):
        raise ConfigError(
            f"rollout.function: {name!r} is made with ({', '.join(arguments)}), as its module has "
            f"{'an' if has_options else 'no'} Options, it takes {_show(signature)}"
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


def _show(signature: inspect.Signature) -> str:
    """Return the signature without type annotations."""
    parameters = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))
