"""Rewards made of rewards: weighted parts (reward.kind = "parts"), and a reward for each row (data.reward_key)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.errors import RewardError
from asyncrl.rewards.guard import GuardedReward
from asyncrl.rewards.port import Reward, Sample


@dataclass(frozen=True, slots=True)
class WeightedPart:
    weight: float
    reward: GuardedReward


class WeightedParts:
    """The weighted sum of the parts' rewards, for a whole group.

    A part with weight 0 is only a metric. It still takes its time, and its failure still fails the sample.
    """

    def __init__(self, parts: Mapping[str, WeightedPart]) -> None:
        self._parts = dict(parts)
        self.needs_label = any(getattr(one.reward.function, "needs_label", False) for one in parts.values())
        voters = [one.reward.function for one in parts.values() if hasattr(one.reward.function, "vote")]
        if voters:
            self.vote = voters[0].vote  # majority votes come from the first part that has them

    async def __call__(self, samples: Sequence[Sample]) -> list[Reward | RewardError]:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = {
                    name: group.create_task(one.reward.judge(samples), name=f"reward.{name}")
                    for name, one in self._parts.items()
                }
        except ExceptionGroup as error:
            raise error.exceptions[0] from error.exceptions[0].__cause__
        return [self._sum({name: task.result()[at] for name, task in tasks.items()}) for at in range(len(samples))]

    def limit_groups(self, seconds: float) -> None:
        """Each part keeps the limit itself (GuardedReward)."""

    def check_label(self, label: Any, metadata: Mapping[str, Any]) -> None:
        for name, one in self._parts.items():
            try:
                getattr(one.reward.function, "check_label", lambda label, metadata: None)(label, metadata)
            except ValueError as error:
                raise ValueError(f"reward.parts.{name}: {error}") from None

    def check_machine(self) -> None:
        """Raise ConfigError if this machine lacks something that a part needs."""
        for one in self._parts.values():
            one.reward.check_machine()

    async def close(self) -> None:
        for one in self._parts.values():
            await one.reward.close()

    def _sum(self, parts: Mapping[str, Reward | RewardError]) -> Reward | RewardError:
        """Return the sum, or the first error: a sum without a part would be another reward."""
        found = {}
        for name, one in parts.items():
            if isinstance(one, RewardError):
                return one
            found[name] = one
        told = {name: reward.value for name, reward in found.items()}
        for name, reward in found.items():
            for inner, value in reward.parts.items():
                if f"{name}.{inner}" in told:
                    raise RewardError(f"reward parts: two parts are {name}.{inner}; rename one of [reward.parts]")
                told[f"{name}.{inner}"] = value
        return Reward(value=sum(self._parts[name].weight * one.value for name, one in found.items()), parts=told)


class RowRewards:
    """A RewardFn that chooses a reward by row. All samples of a group belong to one row."""

    def __init__(self, default: GuardedReward, by_name: Mapping[str, GuardedReward]) -> None:
        self._default, self._by_name = default, dict(by_name)

    async def __call__(self, samples: Sequence[Sample]) -> Sequence[Reward | RewardError]:
        name = samples[0].reward
        if name and name not in self._by_name:
            raise RewardError(f"the row's reward {name!r} is none of this worker's: {', '.join(self._by_name)}")
        return await (self._by_name[name] if name else self._default)(samples)

    def check_machine(self) -> None:
        """Raise ConfigError if this machine lacks something that one of the rewards needs."""
        for reward in (self._default, *self._by_name.values()):
            reward.check_machine()

    async def close(self) -> None:
        for reward in (self._default, *self._by_name.values()):
            await reward.close()
