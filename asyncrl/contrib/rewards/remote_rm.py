"""reward.kind = "remote_rm": a server that was made for slime's remote_rm rewards each answer.

POST url  {"prompt": ..., "response": ..., "label": ...}
answer    1.0, or {"format": 0.2, "correct": 1.0}, which is read as that of a function of your own (rewards/load.py)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from asyncrl.rewards.http import HttpOptions, JsonServer
from asyncrl.rewards.port import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(HttpOptions):
    """See HttpOptions. With ``server``, requests go to the root of a server of a kind of your own."""


class RemoteRM:
    """Sends one request per answer, those of a group at once."""

    def __init__(self, options: Options) -> None:
        self._server = JsonServer(options, is_at_root=True, name="reward remote_rm")

    async def __call__(self, sample: Sample) -> Any:
        sent = {"prompt": sample.prompt, "response": sample.completion, "label": sample.label}
        return await self._server.ask(sent, lambda answer: answer, servers=sample.servers)

    async def close(self) -> None:
        await self._server.close()
