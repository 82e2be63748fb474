"""Call a reward function on one group; return valid rewards, or RewardErrors with one-line reasons.

The worker survives whatever a user's function does: raise, hang, return invalid values, or block.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, Final

from asyncrl.config import plugins
from asyncrl.errors import OUTAGES, ConfigError, MaybeOutage, Outage, RewardError
from asyncrl.messages.user_copies import own_trajectory, read_only
from asyncrl.outage import outage_kind
from asyncrl.rewards.port import CATEGORY, MOST_PARTS, Reward, Sample, part_problem

_LARGEST_METRIC: Final = 1e12
MAX_THREADS: Final = 16
"""Number of plain functions that run at once; others wait."""

log = logging.getLogger("asyncrl.rewards")


class GuardedReward:
    """A RewardFn that wraps any function: plain or async, of a sample or of a group."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str,
        takes_group: bool,
        timeout_seconds: float,
        largest: float = math.inf,
        keeps_special_tokens: bool = True,
        is_built_in: bool = False,
    ) -> None:
        """
        timeout_seconds  time limit of one group. A function with a method ``limit_groups(seconds)`` is given the limit
                         and keeps it itself, because its groups wait for each other's processes
        largest          limit for the magnitude of a reward and its parts; the learner enforces the same limit
        is_built_in      it writes to no sample, so it needs no copies
        """
        self.keeps_special_tokens = keeps_special_tokens
        self._is_built_in = is_built_in
        self._largest = largest
        self._function = function
        self._name = name
        self._takes_group = takes_group
        self._timeout_seconds = timeout_seconds
        limit_groups = getattr(function, "limit_groups", None)
        if limit_groups is not None:
            limit_groups(timeout_seconds)
        self._limits_groups = limit_groups is not None
        call = getattr(function, "__call__", function)  # noqa: B004 - an object's own coroutine method
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)
        self._threads = asyncio.Semaphore(MAX_THREADS)

    @property
    def function(self) -> Callable[..., Any]:
        """The wrapped function."""
        return self._function

    def check_machine(self) -> None:
        """Call the function's ``check_machine``, if it has one. Raises ConfigError if this machine lacks something."""
        check = getattr(self._function, "check_machine", None)
        if check is not None:
            try:
                check()
            except ConfigError as error:
                raise ConfigError(f"reward {self._name}: {error}") from None

    async def votes(self, completions: Sequence[str]) -> tuple[list[str], str]:
        """Return each answer's vote for majorities, and the first problem ("" if there is none).

        The vote is the result of the function's ``vote``, or the whole answer if it has no such method. The vote is ""
        if ``vote`` raises or exits, or does not reach the answer within reward.timeout_seconds. A missing vote must not
        end the worker.
        """
        vote = getattr(self._function, "vote", None)
        if vote is None:
            return [completion.strip() for completion in completions], ""
        found: list[str] = []
        problems: list[str] = []

        def look(completions: Sequence[str]) -> None:
            for completion in completions:
                try:
                    with plugins.contain_exits():
                        found.append(str(vote(completion)))
                except Exception as error:  # an error of a user's function must not crash the worker
                    found.append("")
                    problems.append(f"vote() raised {plugins.describe_raised(error)}")

        try:
            async with asyncio.timeout(self._timeout_seconds), self._threads:
                await in_thread(look, completions)
        except TimeoutError:
            problems.append(f"vote() took longer than reward.timeout_seconds = {self._timeout_seconds:g}")
        votes = found[: len(completions)]  # the thread may still be running and appending
        return [*votes, *[""] * (len(completions) - len(votes))], problems[0] if problems else ""

    async def __call__(self, samples: Sequence[Sample]) -> list[Reward | RewardError]:
        """Return one reward per sample, in order, with the reward parts of the rollout function added.

        If both set a part of the same name, the reward function's part wins. Otherwise as ``judge``.
        """
        found = [
            reward
            if isinstance(reward, RewardError)
            else self._checked(Reward(value=reward.value, parts={**sample.trajectory.reward_parts, **reward.parts}))
            for sample, reward in zip(samples, await self.judge(samples), strict=True)
        ]
        _raise_if_none(found)
        return found

    async def judge(self, samples: Sequence[Sample]) -> list[Reward | RewardError]:
        """Return one reward per sample, in order, as the function returns it; an error for a sample that has none.

        Raises RewardError if no sample has a reward; Outage if that is because a service is away.
        """
        if not self.keeps_special_tokens:
            samples = [
                replace(one, completion=one.completion if one.plain is None else one.plain, marked=one.completion)
                for one in samples
            ]
        deadline = None if self._limits_groups else asyncio.get_running_loop().time() + self._timeout_seconds
        if self._takes_group:
            values = self._as_list(await self._ask(samples, deadline))
            if len(values) != len(samples):
                raise RewardError(f"reward {self._name}: returned {len(values)} rewards for {len(samples)} samples")
        else:  # concurrently, one call each
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._ask_or_error(sample, deadline), name="reward") for sample in samples]
            values = [task.result() for task in tasks]
            if any(isinstance(value, Outage) for value in values):  # the others are not asked again with these
                for sample, value in zip(samples, values, strict=True):
                    sample.kept.update({} if isinstance(value, RewardError) else {id(self): value})
        found = [value if isinstance(value, RewardError) else self._reward(value) for value in values]
        _raise_if_none(found)
        return found

    async def close(self) -> None:
        """Call the function's ``close``, if it has one, to release processes and connections."""
        close = getattr(self._function, "close", None)
        if close is not None:
            result = close()
            if inspect.isawaitable(result):
                await result

    async def _ask_or_error(self, sample: Sample, deadline: float | None) -> Any:
        if id(self) in sample.kept:
            return sample.kept[id(self)]
        try:
            return await self._ask(sample, deadline)
        except RewardError as error:
            return error

    async def _ask(self, argument: Any, deadline: float | None) -> Any:
        """Call the function until ``deadline``. Raises RewardError whatever it does, Outage if a service is away."""
        try:
            async with asyncio.timeout_at(deadline) as timeout:
                return await self._call(argument)
        except TimeoutError as error:
            if timeout.expired():
                reason = f"took longer than reward.timeout_seconds = {self._timeout_seconds:g}"
                # A plain function's thread goes on: it may be an endless loop, of which more tries would start more.
                raise (MaybeOutage if self._is_async else RewardError)(f"reward {self._name}: {reason}") from None
            raise self._wrap(error) from error
        except asyncio.CancelledError as error:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            raise RewardError(f"reward {self._name}: cancelled itself") from error
        except RewardError:
            raise
        except Exception as error:  # an error of a user's function must not crash the worker
            raise self._wrap(error) from error

    def _as_list(self, values: Any) -> list[Any]:
        if isinstance(values, str | bytes | Mapping | Set) or not hasattr(values, "__len__"):
            raise RewardError(f"reward {self._name}: must return a list of rewards, returned {_shorten(values)}")
        return list(values)

    async def _call(self, argument: Any) -> Any:
        if self._is_async:
            with plugins.contain_exits():
                return await self._call_with_copies(argument)
        async with self._threads:
            result = await in_thread(self._call_with_copies, argument)
        if not inspect.isawaitable(result):
            return result
        with plugins.contain_exits():
            return await result

    def _call_with_copies(self, argument: Any) -> Any:
        """Call the function with its own copies of the samples, so that it cannot write to what others read."""
        if self._is_built_in:
            return self._function(argument)
        return self._function(_copy(argument) if isinstance(argument, Sample) else [*map(_copy, argument)])

    def _reward(self, value: Any) -> Reward | RewardError:
        try:
            reward = _as_reward(value, largest=self._largest)
        except RewardError as error:
            return RewardError(f"reward {self._name}: {error}: {_shorten(value)}")
        except Exception:  # a user's object raised, or an integer is too large for a float
            return RewardError(
                f"reward {self._name}: must be a number, a Reward or a dict of parts, got {_shorten(value)}"
            )
        return self._checked(reward)

    def _checked(self, reward: Reward) -> Reward | RewardError:
        try:
            return self._check(reward)
        except RewardError as error:
            return error

    def _check(self, reward: Reward) -> Reward:
        for part, number in (*reward.parts.items(), ("the reward", reward.value)):
            if not math.isfinite(number):
                raise RewardError(f"reward {self._name}: {part} is {number}")
            if abs(number) > self._largest:
                limit = f"reward.largest = {self._largest:g}"
                raise RewardError(
                    f"reward {self._name}: {part} is {number:.4g}, beyond {limit}; raise that or scale it"
                )
        if len(reward.parts) > MOST_PARTS:
            raise RewardError(f"reward {self._name}: has {len(reward.parts)} parts, and {MOST_PARTS} are allowed")
        for part in reward.parts:
            if problem := part_problem(part):
                raise RewardError(f"reward {self._name}: {problem}")
        return reward

    def _wrap(self, error: Exception) -> RewardError:
        kind = OUTAGES.get(outage_kind(error), RewardError)
        return kind(f"reward {self._name}: raised {plugins.describe_raised(error)}")


def _raise_if_none(found: Sequence[Reward | RewardError]) -> None:
    """Raise an Outage, or else the first error, if there are only errors."""
    problems = [one for one in found if isinstance(one, RewardError)]
    if problems and len(problems) == len(found):
        raise next((one for one in problems if isinstance(one, Outage)), problems[0])


def _copy(sample: Sample) -> Sample:
    """Return a copy whose tables and arrays are its own."""
    parts = tuple(map(own_trajectory, sample.parts))
    is_last = bool(sample.parts) and sample.trajectory is sample.parts[-1]
    return replace(
        sample,
        kept={},
        label=copy.deepcopy(sample.label),
        metadata=copy.deepcopy(sample.metadata),
        prompt_tokens=read_only(sample.prompt_tokens),
        trajectory=parts[-1] if is_last else own_trajectory(sample.trajectory),
        parts=parts,
    )


TOTALS: Final = ("score", "reward", "overall", "total")
"""Keys of a dict that name the whole reward, as in verl's {"score": 1.0, "acc": True, "pred": "5"} and EasyR1's
{"overall": 0.9, "format": 1.0, "accuracy": 0.8}."""


def _as_reward(value: Any, *, largest: float) -> Reward:
    if isinstance(value, Mapping) and isinstance(name := value.get(CATEGORY), str):
        rest = {key: other for key, other in value.items() if key != CATEGORY}
        if not rest:
            raise RewardError(f"has a category and no number: {name[:40]!r}")
        reward = _as_reward(rest, largest=largest)
        return Reward(value=reward.value, parts={**reward.parts, **({f"{CATEGORY}/{name}": 1.0} if name else {})})
    if isinstance(value, Reward):
        return Reward(value=_number(value.value), parts=_numbers(value.parts))
    if isinstance(value, Mapping) and (total := [name for name in TOTALS if name in value]):
        if len({_number(value[name]) for name in total}) > 1:
            raise RewardError(f"has {' and '.join(total)}, which differ: one of them must be the reward")
        name = total[0]
        # What else it says may be the model's own: an answer that is text, or too large a number, is no metric.
        rest = {str(key): _metric(other) for key, other in value.items() if key != name}
        return Reward(
            value=_number(value[name]),
            parts={key: number for key, number in rest.items() if abs(number) <= min(largest, _LARGEST_METRIC)},
        )
    if isinstance(value, Mapping):
        if not value:
            raise RewardError("is an empty dict")
        parts = _numbers(value)
        return Reward(value=sum(parts.values()), parts=parts)
    return Reward(value=_number(value))


def _numbers(parts: Mapping[Any, Any]) -> dict[str, float]:
    return {str(name): _number(number) for name, number in parts.items()}


def _metric(value: Any) -> float:
    """Return a number, or NaN for what is none."""
    try:
        return _number(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _number(value: Any) -> float:
    if isinstance(value, str | bytes | bytearray):  # float() would parse them
        raise TypeError
    return float(value)


async def in_thread(function: Callable[..., Any], argument: Any) -> Any:
    """Run ``function(argument)`` in a daemon thread, so that a hung function cannot keep the process alive."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def finish(value: Any, error: BaseException | None) -> None:
        if not done.done():  # cancelled by the caller
            done.set_result((value, error))

    def work() -> None:
        value, problem = None, None
        try:
            value = function(argument)
        except BaseException as error:  # pass it to the caller, even SystemExit, which a thread would lose
            problem = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(finish, value, problem)

    threading.Thread(target=work, name="reward", daemon=True).start()
    value, problem = await done
    if isinstance(problem, Exception):
        raise problem
    if problem is not None:
        raise plugins.UserExit(plugins.describe_raised(problem))
    return value


def _shorten(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:  # a user's __repr__ raised, or an integer has too many digits
        text = plugins.with_article(type(value))
    text = " ".join(text.split())
    return text if len(text) <= 60 else text[:57] + "..."
