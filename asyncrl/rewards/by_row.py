"""Rewards per row: data.reward_key names each prompt's reward; reward.kind applies to rows that name none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from asyncrl.errors import RewardError
from asyncrl.rewards.guard import GuardedReward
from asyncrl.rewards.port import Reward, Sample


class RowRewards:
    """A RewardFn that chooses a reward by row. All samples of a group belong to one row."""

    def __init__(self, default: GuardedReward, by_name: Mapping[str, GuardedReward]) -> None:
        self._default, self._by_name = default, dict(by_name)

    async def __call__(self, samples: Sequence[Sample]) -> Sequence[Reward]:
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
