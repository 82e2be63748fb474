"""Load the RewardFn of [reward] in the run file: built-in kinds by name, your own as "package.module:function".

Your own reward is a function of one argument, plain or ``async``:

    def reward(sample: Sample) -> float                    one trajectory at a time
    def reward(samples: Sequence[Sample]) -> list[float]   the whole group: the argument is called ``samples``,
                                                           or annotated as a list, tuple or Sequence

It returns a number, a ``Reward``, or a dict of parts whose sum is the reward. If one part is called "score", "reward",
"overall" or "total", that is the reward, and the others are metrics. Plain functions run in threads. A class
is also possible. It is instantiated once and then called; if its module has an ``Options``, it gets one built from
[reward.options].
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re
import sys
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, MutableSequence, Sequence
from typing import Any, Final

from asyncrl import config
from asyncrl.config import plugins, tables
from asyncrl.errors import ConfigError
from asyncrl.rewards.guard import GuardedReward
from asyncrl.rewards.parts import RowRewards, WeightedPart, WeightedParts
from asyncrl.rewards.port import RewardFn, part_problem

KINDS: Final = {
    "math": "asyncrl.rewards.math:MathReward",
    "dapo": "asyncrl.contrib.rewards.dapo:DapoReward",
    "deepscaler": "asyncrl.contrib.rewards.deepscaler:DeepScalerReward",
    "gpqa": "asyncrl.contrib.rewards.gpqa:GpqaReward",
    "f1": "asyncrl.contrib.rewards.f1:F1Reward",
    "rouge": "asyncrl.contrib.rewards.rouge:RougeReward",
    "json_schema": "asyncrl.contrib.rewards.json_schema:JsonSchemaReward",
    "ifeval": "asyncrl.contrib.rewards.ifeval:IfEvalReward",
    "ifbench": "asyncrl.contrib.rewards.ifbench:IfBenchReward",
    "code": "asyncrl.rewards.code:CodeReward",
    "exact": "asyncrl.rewards.exact:ExactReward",
    "regex": "asyncrl.contrib.rewards.regex:RegexReward",
    "llm_judge": "asyncrl.rewards.llm_judge:JudgeReward",
    "reward_model": "asyncrl.rewards.reward_model:RewardModel",
    "remote": "asyncrl.rewards.remote:RemoteReward",
    "remote_rm": "asyncrl.contrib.rewards.remote_rm:RemoteRM",
    "reasoning_gym": "asyncrl.contrib.reasoning_gym:Score",
    "random": "asyncrl.contrib.rewards.random:RandomReward",
    "none": "asyncrl.rewards.none:no_reward",
    "parts": "asyncrl.rewards.parts:WeightedParts",
}

SERVED_KINDS: Final = ("llm_judge", "reward_model", "remote", "remote_rm")
"""Kinds that may ask a server of [servers] by its name."""
PARTS: Final = "parts"

_FRAMEWORKS: Final = {"solution_str": "verl", "ground_truth": "verl", "completions": "TRL"}
"""Argument of other frameworks' reward functions -> the framework."""

GROUPS: Final = (list, tuple, Collection, Iterable, MutableSequence, Sequence)
"""Argument annotations of a function that takes all samples of a group. Exact types only: a str is also an Iterable."""


def load_reward(section: config.RewardSection, *, where: str = "reward.kind") -> GuardedReward:
    """Return the reward of the run file, ready to be called. Starts no process. Raises ConfigError naming ``where``."""
    if section.parts or section.kind == PARTS:
        function: Callable[..., Any] = _make_parts(section)
    else:
        function = _make(plugins.load(section.kind, where=where, table=KINDS), section)
    return GuardedReward(
        function,
        name=section.kind,
        takes_group=takes_group(function, name=section.kind),
        timeout_seconds=section.timeout_seconds,
        largest=section.largest,
        keeps_special_tokens=section.keep_special_tokens,
        is_built_in=section.kind in KINDS,
    )


OF_ROWS: Final = (
    "math",
    "dapo",
    "deepscaler",
    "gpqa",
    "f1",
    "rouge",
    "json_schema",
    "ifeval",
    "ifbench",
    "exact",
    "regex",
    "random",
)
"""Built-in kinds that a row may name without an entry in reward.rows."""


def load_rewards(section: config.RewardSection, *, are_by_row: bool) -> RewardFn:
    """Return the reward of the run. Raises ConfigError.

    are_by_row  data.reward_key is set, so that each row may name its reward
    """
    default = load_reward(section, where="reward.kind")
    if not are_by_row:
        if section.rows:
            raise ConfigError("reward.rows: no column says which; set data.reward_key")
        return default
    rows = {name: load_reward(one, where="reward.rows") for name, one in rewards_of_rows(section).items()}
    return RowRewards(default, rows)


def _make_parts(section: config.RewardSection) -> WeightedParts:
    """Build the reward of reward.kind = "parts". Raises ConfigError."""
    if not section.parts:
        raise ConfigError('reward.kind: "parts" needs parts, such as [reward.parts.right] with kind = "math"')
    if section.kind != PARTS:
        raise ConfigError(
            f'reward.parts: reward.kind is "{section.kind}", and they would not count; set it to "parts" or remove them'
        )
    if section.options:
        raise ConfigError("reward.options: a reward of parts has none; say options of each part")
    made = {}
    for name, one in section.part_sections.items():
        if problem := part_problem(name):
            raise ConfigError(f"reward.parts: {problem}")
        if one.kind in ("", PARTS):
            problem = "missing kind" if not one.kind else "a part has no parts of its own"
            raise ConfigError(f"reward.parts: {name}: {problem}")
        try:
            made[name] = WeightedPart(section.parts[name].weight, load_reward(one))
        except ConfigError as error:
            raise ConfigError(f"reward.parts: {name}: {error}") from None
    return WeightedParts(made)


def rewards_of_rows(section: config.RewardSection) -> dict[str, config.RewardSection]:
    """Return the sections of the rewards that rows may name. Raises ConfigError.

    Built-in kinds that are not installed, or that require options, are left out.
    """
    kinds: dict[str, str] = {}
    for name in OF_ROWS:
        with contextlib.suppress(ConfigError):
            load_reward(config.RewardSection(kind=name))
            kinds[name] = name
    for name, kind in section.rows.items():
        if not isinstance(kind, str) or not name:
            raise ConfigError(f"reward.rows: {name!r} must name a reward, such as 'package.module:function'")
        kinds[name] = kind
    return {
        name: section
        if kind == section.kind
        else dataclasses.replace(section, kind=kind, options={}, rows={}, parts={})
        for name, kind in kinds.items()
    }


def needs_label(section: config.RewardSection) -> bool:
    """Whether the reward compares with a label, so that every row must have one. Raises ConfigError.

    Reads the attribute ``needs_label`` of the reward's object.
    """
    return bool(getattr(load_reward(section).function, "needs_label", False))


def label_check(section: config.RewardSection) -> Callable[[Any, Mapping[str, Any]], None]:
    """Return the reward's ``check_label``, or a check that accepts everything. Raises ConfigError.

    The check raises ValueError if the reward cannot judge answers by a row's label and metadata.
    """
    return getattr(load_reward(section).function, "check_label", lambda label, metadata: None)


_TIMED_BY_SIGNALS: Final = re.compile(r"(?m:^)\s*(?:import|from) math_verify\b|\bsignal\.(?:alarm|setitimer)\(")


def oddities(section: config.RewardSection) -> list[str]:
    """Return one line for each function that seems to need the main thread, which a plain function does not get.

    math-verify's own time limits raise in a thread, and a function that catches every error then gives only zeros.
    """
    return [
        f"reward {kind}: it runs in a thread, where time limits by signals (signal.alarm, math-verify's own) raise; if "
        "it catches that, every answer gets the same reward -> call parse(..., parsing_timeout=None) and "
        'verify(..., timeout_seconds=None), or use reward.kind = "math"'
        for kind in dict.fromkeys(section.kinds)
        if kind and kind not in KINDS and _needs_main_thread(plugins.load(kind, where="reward", table=KINDS))
    ]


def _needs_main_thread(found: Any) -> bool:
    """Whether the source of a plain function's module, or of what this imports by name, sets a timer by signals."""
    call = found.__call__ if inspect.isclass(found) else found
    if inspect.iscoroutinefunction(call):
        return False
    own = sys.modules.get(getattr(found, "__module__", ""))
    if own is None:
        return False
    used = {str(getattr(value, "__module__", "")) for value in vars(own).values()}
    modules = [own, *(sys.modules[name] for name in used if name in sys.modules and not name.startswith("math_verify"))]
    sources = []
    for module in modules:
        with contextlib.suppress(OSError, TypeError):  # built in
            sources.append(inspect.getsource(module))
    return any(_TIMED_BY_SIGNALS.search(one) and "parsing_timeout" not in one for one in sources)


_OTHERS: Final = {
    "completions": ("TRL", "def reward(sample): return theirs([sample.completion], label=[sample.label])[0]"),
    "solution_str": (
        "verl",
        'def reward(sample): return theirs(sample.metadata["data_source"], sample.completion, sample.label)',
    ),
}
"""Names of arguments by which reward functions of other frameworks are known, and how to call such a function."""


def takes_group(function: Callable[..., Any], *, name: str) -> bool:
    """Whether a reward function wants all samples of a group at once. Raises ConfigError for other signatures."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        raise ConfigError(f"reward.kind: {name!r} has no readable signature; write a Python function") from None
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if parameters and (
        call := next((own for name, own in _OTHERS.items() if name in [p.name for p in parameters]), "")
    ):
        raise ConfigError(
            f"reward.kind: {name!r} takes {', '.join(p.name for p in parameters)}, as in {call[0]}; write a function "
            f"of one argument around it: {call[1]}"
        )
    if not parameters or parameters[0].kind not in positional or len(required) > 1:
        shown = ", ".join(p.name for p in parameters) or "no arguments"
        origin = next((_FRAMEWORKS[p.name] for p in parameters if p.name in _FRAMEWORKS), "")
        hint = f"; docs/start/from_trl_and_verl.md wraps a reward of {origin}" if origin else ""
        if [p.name for p in required][:1] == ["args"]:
            hint = "; a reward of slime goes without args here, and reads sample.completion for its sample.response"
        raise ConfigError(
            f"reward.kind: {name!r} must take one argument, sample or samples (see asyncrl.rewards.port.Sample), "
            f"and it takes {shown}{hint}"
        )
    return parameters[0].name == "samples" or _is_sequence(_annotation(function, parameters[0]))


def _make(found: Any, section: config.RewardSection) -> Callable[..., Any]:
    """Return ``found``, or an instance if it is a class."""
    options_type = getattr(sys.modules[found.__module__], "Options", None) if inspect.isclass(found) else None
    if options_type is not None:
        options = tables.build(options_type, section.options, "reward.options")
        made = plugins.make(found, options, where="reward.kind", name=section.kind)
    elif section.options:
        raise ConfigError(f"reward.options: {section.kind!r} takes no options, got {', '.join(section.options)}")
    else:
        made = plugins.make(found, where="reward.kind", name=section.kind) if inspect.isclass(found) else found
    if not callable(made):
        raise ConfigError(f"reward.kind: {section.kind!r} is a class without __call__")
    return typing.cast("Callable[..., Any]", made)


def _annotation(function: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    """Return the parameter's type, or its annotation as written if it cannot be resolved."""
    target = function if inspect.isroutine(function) else function.__call__  # type: ignore[operator]
    try:
        return typing.get_type_hints(target).get(parameter.name, parameter.annotation)
    except (NameError, TypeError, AttributeError):  # names imported for type checking only
        return parameter.annotation


def _is_sequence(annotation: Any) -> bool:
    if isinstance(annotation, str):
        return annotation.partition("[")[0].rpartition(".")[2].lower() in {kind.__name__.lower() for kind in GROUPS}
    return (typing.get_origin(annotation) or annotation) in GROUPS
