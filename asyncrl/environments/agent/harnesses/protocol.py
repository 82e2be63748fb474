"""The interface of a harness: it gets a task and an endpoint, and returns an outcome.

    async def play(task: Task, endpoint: Endpoint) -> Outcome

A harness lets an agent work on one task. The agent may call the model server at ``endpoint`` any number of times, in
any order. The harness does not report tokens, because the endpoint records every sampled token.

This file imports only the standard library, because children in other virtual environments load it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One sample of one prompt group.

    prompt    text of the row's prompt, as tokenised
    messages  the prompt as chat messages, {"role": ..., "content": ...}: the row's messages with data.chat_template;
              without it, ``prompt`` as one user message
    label, metadata  those of the row
    group_id  id of the prompt group; all its samples have the same task
    index     number of this sample in its group, from 0
    seed      63-bit seed for the harness's own randomness; stays the same if the sample runs again
    servers   the frozen models of rollout.options.servers, by name: ``url`` of OpenAI's protocol (http://HOST:PORT/v1),
              ``key`` ("": none) and ``model``
    """

    prompt: str
    messages: Sequence[Mapping[str, Any]] = ()
    label: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    group_id: int = 0
    index: int = 0
    seed: int = 0
    servers: Mapping[str, Mapping[str, str]] = field(default_factory=dict, repr=False)

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"messages": list(self.messages) or [{"role": "user", "content": self.prompt}]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A model server for one sample.

    base_url  URL without a path; give OpenAI clients base_url + "/v1", and Anthropic clients base_url
    api_key   identifies the sample; invalid once the sample has ended
    model     model name for requests
    """

    base_url: str
    api_key: str = field(repr=False)
    model: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of an agent's work on a task.

    reward         reward of the rollout; None leaves it to the run's reward function
    reward_parts   parts of the reward; each becomes the metric reward/NAME
    turn_rewards   rewards of single answers, by their ids as the endpoint's replies have them: {"chatcmpl-...": 0.5};
                   for a request of several answers (n = 2) one number for each: {"chatcmpl-...": [0.5, 0]}. Or a list,
                   if each call of the sample continues the one before: one number for each
    metrics        other numbers of the sample; each becomes the metric reward/NAME; names must differ from reward_parts
    finish_reason  "length" if the sample was cut off before the agent was done; otherwise ""
    """

    reward: float | None = None
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    turn_rewards: Mapping[str, float | Sequence[float]] | Sequence[float] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    finish_reason: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Harness(Protocol):
    """Lets an agent work on one task. If it raises, the sample fails with that reason."""

    async def __call__(self, task: Task, endpoint: Endpoint) -> Outcome: ...


def outcome_of(value: Any) -> Outcome:
    """Convert a harness's return value: an Outcome, a number, a table of Outcome's fields, or None for no reward.

    Raises ValueError for any other value, for a number that is not finite, and for a name in both reward_parts and
    metrics.
    """
    if value is None:
        return Outcome()
    if isinstance(value, bool | int | float):
        return Outcome(reward=_number("reward", value))
    if not isinstance(value, Mapping):
        if not hasattr(value, "reward"):
            raise ValueError(f"an outcome is a number, a table or an Outcome, got {_short(value)}")
        value = {name: getattr(value, name) for name in Outcome.__slots__ if hasattr(value, name)}
    if unknown := [name for name in value if name not in Outcome.__slots__]:
        raise ValueError(f"an outcome has no {unknown[0]!r}; it has {', '.join(Outcome.__slots__)}")
    finish_reason = value.get("finish_reason") or ""
    if finish_reason not in ("", "length"):
        raise ValueError(f'finish_reason is "length" or "", got {_short(finish_reason)}')
    reward = value.get("reward")
    parts, metrics = (_numbers(what, value.get(what)) for what in ("reward_parts", "metrics"))
    if both := sorted(parts.keys() & metrics.keys()):
        raise ValueError(f"{both[0]!r} is in reward_parts and in metrics, and both are the metric reward/{both[0]}")
    return Outcome(
        reward=None if reward is None else _number("reward", reward),
        reward_parts=parts,
        turn_rewards=_turn_rewards(value.get("turn_rewards")),
        metrics=metrics,
        finish_reason=finish_reason,
    )


def _numbers(what: str, value: Any) -> dict[str, float]:
    if not isinstance(value or {}, Mapping):
        raise ValueError(f"{what} is a table of numbers, got {_short(value)}")
    return {str(name): _number(f"{what}.{name}", one) for name, one in (value or {}).items()}


def _turn_rewards(value: Any) -> Mapping[str, float | Sequence[float]] | Sequence[float]:
    if not isinstance(value, Mapping):
        return _list("turn_rewards", value)
    return {
        str(name): _number(f"turn_rewards.{name}", one) if not _is_list(one) else _list(f"turn_rewards.{name}", one)
        for name, one in value.items()
    }


def _list(what: str, value: Any) -> tuple[float, ...]:
    if value is not None and not _is_list(value):
        raise ValueError(f"{what} is a list of numbers or a table of them, got {_short(value)}")
    return tuple(_number(what, one) for one in value or ())


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _number(what: str, value: Any) -> float:
    if isinstance(value, str | bytes):  # float() would parse them
        raise ValueError(f"{what} is a number, got {_short(value)}")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{what} is a number, got {_short(value)}") from None
    if not math.isfinite(number):
        raise ValueError(f"{what} is {number}")
    return number


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."
