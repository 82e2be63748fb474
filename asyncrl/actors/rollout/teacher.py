"""Asks the servers of teachers ([teacher] server) for the logprobs of sampled answers, as soon as these are sampled.

A teacher is frozen, so what it says of an answer never gets old: the logprobs travel with the trajectory, and the
learner needs no model for them. A teacher that is away is waited for, as a judge is (outages.py).

Two protocols: SGLang's /generate, which names the tokens that it scored, and OpenAI's /completions with ``echo``, which
gives their texts. Both are compared with the policy's tokenizer in a server's first answer.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.environments.port import Tokenizer
from asyncrl.errors import ConfigError, Outage, RewardError
from asyncrl.messages import PromptGroup, Trajectory, replace
from asyncrl.messages.control import ServerAddress
from asyncrl.messages.likeliest import NONE, Likeliest, check_likeliest
from asyncrl.rewards.http import HttpOptions, JsonServer

AT_ONCE: Final = 32
"""Requests per worker and teacher."""
REQUEST_SECONDS: Final = 120.0
"""Time limit of one request: a long answer behind others in the server's queue."""
_POSITIVE_LOGPROB: Final = 1e-3
"""Rounding; a logprob is at most 0."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """What a teacher said of the last tokens of a sequence.

    logprobs  f32[T]
    tokens    their ids, if the server named them
    texts     their texts
    likeliest at their places, if they were asked for
    """

    logprobs: NDArray[np.float32]
    tokens: tuple[int, ...] = ()
    texts: tuple[str, ...] = ()
    likeliest: Likeliest = NONE


class Teacher:
    """One server. Raises RewardError for an answer that has no logprobs, Outage while the server is away."""

    def __init__(self, name: str, *, kind: str, tokenizer: Tokenizer, top_logprobs: int = 0) -> None:
        """name, kind: of [servers.NAME]"""
        self._top = top_logprobs
        self._name = name
        self._speaks_openai = kind != "sglang"
        self._tokenizer = tokenizer
        self._is_checked = False
        self._places = asyncio.Semaphore(AT_ONCE)
        self._server = JsonServer(
            HttpOptions(server=name, retries=1, request_timeout_seconds=REQUEST_SECONDS),  # outages.py tries again
            path="/completions" if self._speaks_openai else "/generate",
            is_at_root=not self._speaks_openai,
            name="teacher",
        )

    async def score(
        self, prompt: NDArray[np.int32], tokens: NDArray[np.int32], *, servers: Mapping[str, ServerAddress]
    ) -> Scored:
        """Return what it says of each token behind the prompt, at temperature 1.  i32[P], i32[T]

        Raises ConfigError if the server's tokenizer is another one.
        """
        async with self._places:
            if not self._is_checked:  # vLLM gives no texts where it names the likeliest tokens
                first = await self._ask(prompt, tokens, top=0 if self._speaks_openai else self._top, servers=servers)
                check_tokens(self._name, tokens.tolist(), first, self._tokenizer)
                self._is_checked = True
                if first.likeliest.count or not self._top:
                    return first
            return await self._ask(prompt, tokens, top=self._top, servers=servers)

    async def _ask(
        self, prompt: NDArray[np.int32], tokens: NDArray[np.int32], *, top: int, servers: Mapping[str, ServerAddress]
    ) -> Scored:
        ids = [*prompt.tolist(), *tokens.tolist()]
        model = servers[self._name].model if self._speaks_openai else ""
        body = _openai_request(ids, model, top) if self._speaks_openai else _sglang_request(ids, len(prompt), top)
        read = _read_openai if self._speaks_openai else _read_sglang

        def take(answer: Any) -> Scored:
            try:
                return read(answer, num_prompt=len(prompt), count=len(tokens), top=top)
            except (AttributeError, LookupError, TypeError, ValueError, OverflowError) as error:
                what = f"the {top} likeliest tokens" if top else "logprobs"
                able = "SGLang or vLLM" if top else "SGLang, or a server whose /completions takes echo with logprobs"
                raise self._server.error(
                    f"it does not give {what} of a prompt ({type(error).__name__}: {error}); a teacher is {able}"
                ) from None

        scored = await self._server.ask(body, take, servers=servers)
        if not np.isfinite(scored.logprobs).all() or float(scored.logprobs.max()) > _POSITIVE_LOGPROB:
            raise self._server.error("a logprob of its answer is NaN, infinite or above 0")
        return dataclasses.replace(scored, logprobs=np.minimum(scored.logprobs, np.float32(0)))

    async def close(self) -> None:
        await self._server.close()


class Teachers:
    """All teachers of a run, by the names of their servers."""

    def __init__(
        self, teachers: Mapping[str, Teacher], *, default: str, key: str, servers: Mapping[str, ServerAddress]
    ) -> None:
        """
        default  name of the server of rows that choose none; "": every row chooses
        key      column in which rows choose their teacher; "": they choose none
        """
        self._teachers = teachers
        self._default = default
        self._key = key
        self._servers = servers

    async def score(
        self, prompt: PromptGroup, rollouts: Sequence[tuple[Trajectory, ...]]
    ) -> list[tuple[Trajectory, ...] | RewardError]:
        """Return the rollouts with the teacher's logprobs; an error in place of one that has none.

        Raises Outage while the teacher is away, ConfigError if its tokenizer is another one.
        """
        teacher = self._teacher_of(prompt)
        if prompt.sampling.temperature != 1:
            raise RewardError(f"teacher: its logprobs are at temperature 1, not {prompt.sampling.temperature:g}")
        if prompt.sampling.reports_support:
            raise RewardError(f"teacher: its logprobs are over the whole vocabulary, not {prompt.sampling.changes}")

        async def score_one(one: Trajectory) -> Trajectory:
            before = one.prompt_tokens if len(one.prompt_tokens) else prompt.prompt_tokens
            scored = await teacher.score(before, one.tokens, servers=self._servers)
            made: Trajectory = replace(one, teacher_logprobs=scored.logprobs, teacher_likeliest=scored.likeliest)
            return made

        flat = [part for parts in rollouts for part in parts]
        found = iter(await asyncio.gather(*(score_one(part) for part in flat), return_exceptions=True))
        scored: list[tuple[Trajectory, ...] | RewardError] = []
        for parts in rollouts:
            its = [next(found) for _ in parts]
            problem = next((one for one in its if isinstance(one, BaseException)), None)
            if problem is not None and (isinstance(problem, Outage) or not isinstance(problem, RewardError)):
                raise problem
            scored.append(problem or tuple(its))  # type: ignore[arg-type]
        return scored

    def _teacher_of(self, prompt: PromptGroup) -> Teacher:
        name = prompt.metadata.get(self._key, self._default) if self._key else self._default
        if not isinstance(name, str) or name not in self._teachers:
            raise RewardError(
                f"teacher.key: the row names {str(name)[:40]!r} in {self._key!r}, and [servers] has no such server"
            )
        return self._teachers[name]

    async def close(self) -> None:
        for teacher in self._teachers.values():
            await teacher.close()


def check_tokens(name: str, tokens: Sequence[int], scored: Scored, tokenizer: Tokenizer) -> None:
    """Raise ConfigError if the server's tokens are not the policy's.

    Only texts of plain letters and digits are compared: servers show spaces and halves of characters in many ways.
    """
    if scored.tokens and list(scored.tokens) != list(tokens):
        raise ConfigError(f"servers.{name}: it scored other tokens than it was given; its tokenizer is another one")
    for token, there in zip(tokens, scored.texts, strict=True):
        here = tokenizer.decode([token], skip_special_tokens=False)
        shown, ours = there.strip(), here.strip()
        if shown != ours and all(text.isascii() and text.isalnum() for text in (shown, ours)):
            raise ConfigError(
                f"servers.{name}: its tokenizer is not that of model.path: token {token} is {shown!r} there and "
                f"{ours!r} here, so its logprobs would be of other words; use a teacher of the same family"
            )


def _sglang_request(ids: Sequence[int], num_prompt: int, top: int) -> dict[str, Any]:
    return {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": max(0, num_prompt - 1),
        "return_text_in_logprobs": True,
        **({"top_logprobs_num": top} if top else {}),
    }


def _read_sglang(answer: Any, *, num_prompt: int, count: int, top: int) -> Scored:
    """Each entry is [logprob, token, text]. The entries end with the last token; the first token of all has None.

    The likeliest are a list of such entries at each place.
    """
    entries = answer["meta_info"]["input_token_logprobs"][-count:]
    if len(entries) != count:
        raise ValueError(f"{len(entries)} of {count} tokens")
    return Scored(
        logprobs=np.array([float(entry[0]) for entry in entries], np.float32),
        tokens=tuple(int(entry[1]) for entry in entries),
        texts=tuple(str(entry[2] or "") for entry in entries),  # null from a server that gives none
        likeliest=_likeliest(
            [[(one[0], one[1]) for one in place] for place in answer["meta_info"]["input_top_logprobs"][-count:]],
            top,
            count=count,
        )
        if top
        else NONE,
    )


def _openai_request(ids: Sequence[int], model: str, top: int) -> dict[str, Any]:
    """vLLM names tokens by their ids if it is asked; their texts are not unique."""
    as_ids = {"return_tokens_as_token_ids": True} if top else {}
    return {
        "model": model,
        "prompt": ids,
        "max_tokens": 1,
        "temperature": 1.0,
        "echo": True,
        "logprobs": top or 1,
    } | as_ids


def _read_openai(answer: Any, *, num_prompt: int, count: int, top: int) -> Scored:
    """The lists begin with the prompt's first token and end with the one token that had to be generated, or before.

    The likeliest are a table {"token_id:7": logprob} at each place; it may have the sampled token in addition.
    """
    found = answer["choices"][0]["logprobs"]
    places = found["top_logprobs"][num_prompt : num_prompt + count] if top else []
    logprobs, texts = (found[name][num_prompt : num_prompt + count] for name in ("token_logprobs", "tokens"))
    if len(logprobs) != count or len(texts) != count:
        raise ValueError(f"{len(logprobs)} of {count} tokens")
    return Scored(
        logprobs=np.array([math.nan if one is None else float(one) for one in logprobs], np.float32),
        texts=tuple(map(str, texts)),
        likeliest=_likeliest(
            [[(value, name.removeprefix(_AS_ID)) for name, value in place.items()] for place in places],
            top,
            count=count,
        )
        if top
        else NONE,
    )


_AS_ID: Final = "token_id:"


def _likeliest(places: Sequence[Sequence[tuple[Any, Any]]], top: int, *, count: int) -> Likeliest:
    """Return the ``top`` likeliest of (logprob, token) at each of ``count`` places. Raises ValueError."""
    if len(places) != count:
        raise ValueError(f"the likeliest tokens at {len(places)} of {count} places")
    in_order = [sorted(((float(value), int(token)) for value, token in place), reverse=True) for place in places]
    made = Likeliest.of([place[:top] for place in in_order])
    check_likeliest(made, num_tokens=count, name="its answer")
    return made
