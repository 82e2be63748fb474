"""reward.kind = "reward_model": the score that a reward model behind SGLang's /classify gives each answer.

POST URL/classify  {"model": ..., "text": ["...", ...]}    one text per distinct answer of the group
answer             [{"embedding": [1.7]}, ...]             or {"data": [...]} with such a list

Start SGLang with --is-embedding, or let the run start it: [servers.NAME] with server_arguments = {is-embedding = true}.
"""

from __future__ import annotations

import functools
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from asyncrl.errors import ConfigError
from asyncrl.rewards.http import HttpOptions, JsonServer
from asyncrl.rewards.port import Sample

_FIELDS: Final = {"prompt", "completion", "answer"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(HttpOptions):
    model: str = ""
    """The model's name at the server; empty: that of ``server``."""
    template: str = "{prompt}{completion}"
    """The text to score, with {prompt} and {completion}, or {answer} without its thoughts; such as
    "{prompt}{completion}<|im_end|>" for a model that scores at the end of a message."""

    def __post_init__(self) -> None:
        HttpOptions.__post_init__(self)
        try:
            named = {name for _, name, _, _ in string.Formatter().parse(self.template) if name is not None}
        except ValueError as error:
            raise ConfigError(f"template: {error}; a brace is written {{{{ or }}}}") from None
        if named - _FIELDS or not named & {"completion", "answer"}:
            raise ConfigError(
                f"template: must have {{completion}} or {{answer}}, and may have {{prompt}}, got {self.template!r}"
            )


class RewardModel:
    """Sends one request per group."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._server = JsonServer(options, path="/classify", is_at_root=True, name="reward reward_model")

    async def __call__(self, samples: Sequence[Sample]) -> list[float]:
        texts = [
            self._options.template.format(prompt=one.prompt, completion=one.completion, answer=one.answer)
            for one in samples
        ]
        distinct = list(dict.fromkeys(texts))
        servers = samples[0].servers
        body = {"model": self._options.model or self._server.model_of(servers), "text": distinct}
        read = functools.partial(self._read, count=len(distinct))
        scores = await self._server.ask(body, read, servers=servers)
        of_text = dict(zip(distinct, scores, strict=True))
        return [of_text[text] for text in texts]

    def _read(self, answer: Any, *, count: int) -> list[float]:
        found: Any = answer.get("data") if isinstance(answer, dict) else answer
        try:
            scores = [one["embedding"] for one in found]
            if len(scores) != count or any(len(score) != 1 for score in scores):
                raise ValueError(f"{[len(score) for score in scores][:8]} numbers for {count} texts")
            return [float(score[0]) for score in scores]
        except (LookupError, TypeError, ValueError) as error:
            raise self._server.error(
                f"the answer is not one score per text ({type(error).__name__}: {error}); SGLang serves a reward model "
                "with --is-embedding"
            ) from None

    async def close(self) -> None:
        await self._server.close()
