"""reward.kind = "remote": a server rewards each group.

POST url  {"samples": [{"prompt": ..., "completion": ..., "label": ..., "metadata": {...}}, ...]}
answer    {"rewards": [1.0, {"format": 0.2, "correct": 1.0}, ...]}  or only the list; a dict is read as that of a
          function of your own (load.py)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.rewards.http import HttpOptions, JsonServer
from asyncrl.rewards.port import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(HttpOptions):
    """See HttpOptions. With ``server``, requests go to the root of a server of a kind of your own."""


class RemoteReward:
    """Sends one request per group."""

    def __init__(self, options: Options) -> None:
        self._server = JsonServer(options, is_at_root=True, name="reward remote")

    async def __call__(self, samples: Sequence[Sample]) -> Sequence[Any]:
        sent = [
            {"prompt": s.prompt, "completion": s.completion, "label": s.label, "metadata": dict(s.metadata)}
            for s in samples
        ]
        return await self._server.ask({"samples": sent}, self._read, servers=samples[0].servers)

    def _read(self, answer: Any) -> Sequence[Any]:
        rewards = answer.get("rewards") if isinstance(answer, dict) else answer
        if not isinstance(rewards, list):
            raise self._server.error(f'the answer must be {{"rewards": [...]}} or a list, is {str(answer)[:60]}')
        return rewards

    async def close(self) -> None:
        await self._server.close()
