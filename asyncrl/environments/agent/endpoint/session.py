"""A session: answers the model calls of one sample's agent, and records its turns.

  E1 a request that continues a turn is sent to the engine as that turn's tokens plus the new tokens (chat_format.py);
     the turn itself is never rendered again
  E2 the run's sampling rules apply: a request's temperature is recorded but not obeyed; its max_tokens can only lower
     the limit; fields that would change the distribution in other ways are refused (request.py)
  E3 a request that is repeated because its answer did not arrive gets the same answer, without new sampling
  E4 sampling continues when a client hangs up, because the client will retry
  E5 an answer becomes a turn, which is continued and trained, once its client has received it; others are not trained
Tests: tests/unit/environments/agent/test_session.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from asyncrl.environments.agent.endpoint.chat_format import ChatFormat
from asyncrl.environments.agent.endpoint.images import files_of
from asyncrl.environments.agent.endpoint.parsers import Parsed
from asyncrl.environments.agent.endpoint.request import (
    Json,
    ModelRequest,
    Refused,
    call,
    digest_of_tools,
    digests,
    sort_tool_results,
    texts_of,
)
from asyncrl.environments.agent.endpoint.turns import Tags, Tokens, Turn, Turns, call_id
from asyncrl.environments.port import Generate, Images
from asyncrl.errors import EngineDied, EngineError, ImageError, PromptError
from asyncrl.messages.images import ImageRef

_LONG: Final = 2**16
"""Characters of a long prompt."""
_PIECE: Final = 2**14
Replies = list[Turn] | Refused
"""The answers to one request, or why its prompt cannot be sampled."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prepared:
    """A prompt that is ready to be sampled.

    parent  the turn that the prompt continues; None if it continues no turn
    after   see Turn
    given   the prompt's tokens after the parent's tokens
    limit   maximum number of new tokens
    """

    request: ModelRequest
    tokens: Tokens
    parent: Turn | None
    after: Turn | None
    given: Tokens
    limit: int
    images: tuple[ImageRef, ...]


@dataclass(slots=True, kw_only=True, eq=False)
class Record:
    """A request and its answers, whether its client has received them, and whether the client still listens."""

    replies: asyncio.Task[Replies]
    is_listening: Callable[[], bool]
    is_received: bool = False


class Session:
    """Serves the agent of one sample."""

    def __init__(
        self,
        generate: Generate,
        *,
        chat_format: ChatFormat,
        name: str,
        max_tokens: int,
        context_tokens: int,
        stop: Sequence[str] = (),
    ) -> None:
        """
        name            name of the sample; the same if the sample runs again
        max_tokens      limit of sampled tokens over all calls. The answers of one request share what is left;
                        concurrent requests may each use all of it
        context_tokens  the model's context length, prompt and answer together
        stop            stop strings of this run
        """
        self.key = "sk-" + secrets.token_hex(16)
        self.chat_format = chat_format
        self.turns = Turns()
        self.remembered: dict[str, list[Json]] = {}
        """Conversations up to an answer, by the answer's id, for dialects that continue from an id."""
        self.refusal = ""
        """Why the last request that was refused was refused."""
        self._generate = generate
        self._images: Images | None = getattr(generate, "images", None)  # a wrapper of a user's may have none
        self._tags = Tags(name)
        self.context_tokens = context_tokens
        self._max_tokens = max_tokens
        self.stop = tuple(stop)
        self._num_sampled = 0
        self._num_calls = 0
        self._asked: dict[bytes, Turn] = {}  # Turn.asked and Turn.said
        self._said: dict[bytes, Turn] = {}
        self._records: dict[bytes, list[Record]] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._over = asyncio.Event()
        self._long_prompts = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Session]:
        """Accept requests while the context is open. Cancel unfinished sampling at the end.

        Raises the error that ends the sample: EngineDied, EngineError, or an error raised inside the context.
        """
        try:
            async with asyncio.TaskGroup() as self._tasks:
                try:
                    yield self
                finally:
                    self._over.set()
                    for record in (one for records in self._records.values() for one in records):
                        record.replies.cancel()
        except BaseExceptionGroup as group:
            died, others = group.split(EngineDied)
            failed, _ = (others or group).split(EngineError)
            first = (died or failed or group).exceptions[0]
            raise first from first.__cause__  # not from the group: the log must show the origin

    # -- a request -----------------------------------------------------------------------------------------------------

    async def answer(
        self, body: bytes, request: ModelRequest, *, is_retry: bool, is_listening: Callable[[], bool]
    ) -> Record:
        """Return the record of a request; its answer may still be in progress. Raises Refused before sampling starts.

        body          bytes of the request; equal bytes mean the same request
        is_retry      the client marks the request as a retry
        is_listening  whether the client still waits for the answer
        """
        self._refuse_late()
        key = hashlib.blake2b(body, digest_size=16).digest()
        records = self._records.setdefault(key, [])
        if (record := _find_unreceived(records, is_retry=is_retry)) is not None:
            record.is_listening = is_listening
            return record
        prepared = [await self.prepare_aside(request)] * request.count
        tasks = self._refuse_late()
        if (record := _find_unreceived(records, is_retry=is_retry)) is not None:  # repeated while it was prepared
            record.is_listening = is_listening
            return record
        numbers = range(self._num_calls, self._num_calls + len(prepared))
        self._num_calls += len(prepared)
        task = tasks.create_task(self._sample_all(prepared, numbers))
        record = Record(replies=task, is_listening=is_listening)
        records.append(record)
        return record

    def _refuse_late(self) -> asyncio.TaskGroup:
        if self._over.is_set() or self._tasks is None:
            raise Refused("this sample is over", status=401, code="invalid_api_key")
        return self._tasks

    async def replies(self, record: Record) -> list[Turn]:
        """Wait for the answers and return them. Cancelling the wait does not stop sampling. Raises Refused."""
        if not record.replies.done():
            await asyncio.wait((record.replies,))
        if record.replies.cancelled():
            raise Refused("this sample is over", status=401, code="invalid_api_key")
        if (error := record.replies.exception()) is not None:  # the error also ends the sample
            raise Refused(f"the engine failed: {error}", status=503, code="server_error")
        if isinstance(replies := record.replies.result(), Refused):
            raise replies
        return replies

    def receive(self, record: Record) -> None:
        """Its client has received the answers of a request: now they are turns. Safe to repeat."""
        if not record.is_received and not isinstance(replies := record.replies.result(), Refused):
            record.is_received = True
            for turn in replies:
                self.turns.add(turn)
                if turn.message:
                    self._asked[turn.asked], self._said[turn.said] = turn, turn

    def take_back(self, record: Record) -> None:
        """Its client has not read the answers of a request after all, unless it went on from one of them."""
        replies = record.replies.result()
        if isinstance(replies, Refused):
            return
        if not any(turn.after in replies or turn.parent in replies for turn in self.turns):
            record.is_received = False
            for turn in replies:
                self.turns.remove(turn)
                for known, key in ((self._asked, turn.asked), (self._said, turn.said)):
                    if known.get(key) is turn:
                        del known[key]

    async def prepare_aside(self, request: ModelRequest, *, is_limited: bool = True) -> Prepared:
        """Prepare the prompt of a request, a long one in a thread. Raises Refused.

        Writing and reading the tokens of megabytes takes seconds, in which the worker's other samples go on.
        """
        is_short = sum(map(len, texts_of(request.messages, request.tools))) <= _LONG
        if is_short and not files_of(request.messages):
            return self.prepare(request, is_limited=is_limited)
        async with self._long_prompts:
            return await asyncio.to_thread(self.prepare, request, is_limited=is_limited)

    def prepare(self, request: ModelRequest, *, is_limited: bool = True) -> Prepared:
        """Prepare the prompt of a request. Raises Refused.

        is_limited  refuse a prompt that leaves no room for an answer
        """
        self.chat_format.check(request.tools)
        request = replace(request, messages=sort_tool_results(request.messages))
        self._refuse_huge(request)
        length = _length_to_last_answer(request.messages)
        asked, said = digests(request.messages[:length])[-2:] if length else (b"", b"")
        last = self._said.get(said + digest_of_tools(request.tools))
        tokens, images, parent, begin = self._make_prompt(request, last, length)
        after = parent if request.tokens is not None else self._asked.get(asked)
        left = (self._max_tokens - self._num_sampled) // request.count
        room = min(left, self.context_tokens - len(tokens))
        if room < 1 and is_limited:  # harnesses know this error: they compact, or stop
            raise Refused(
                f"This model's maximum context length is {self.context_tokens} tokens. However, your messages have "
                f"{len(tokens)} tokens, and of this sample's {self._max_tokens} new tokens {max(0, left)} are left for "
                "each answer.",
                code="context_length_exceeded",
            )
        limit = room if request.max_tokens is None else min(room, request.max_tokens)
        return Prepared(
            request=request,
            tokens=tokens,
            parent=parent,
            after=after,
            given=tokens[begin:],
            limit=limit,
            images=images,
        )

    def _refuse_huge(self, request: ModelRequest) -> None:
        """Refuse messages that are far longer than the context before all their tokens are counted."""
        texts = texts_of(request.messages, request.tools)
        if sum(map(len, texts)) <= 8 * self.context_tokens:  # few texts have so many characters in a token
            return
        found = 0
        for piece in (text[at : at + _PIECE] for text in texts for at in range(0, len(text), _PIECE)):
            found += len(self.chat_format.encode(piece))
            if found > 2 * self.context_tokens:  # pieces may have more tokens than the whole, but not twice as many
                raise Refused(
                    f"This model's maximum context length is {self.context_tokens} tokens. However, your messages have "
                    f"more than {found} tokens.",
                    code="context_length_exceeded",
                )

    @property
    def num_unreceived(self) -> int:
        """Number of requests whose answers were sampled, and whose client had hung up."""
        records = [one for records in self._records.values() for one in records if not one.is_received]
        done = [one.replies for one in records if one.replies.done() and not one.replies.cancelled()]
        return sum(one.exception() is None and not isinstance(one.result(), Refused) for one in done)

    # -- prompts -------------------------------------------------------------------------------------------------------

    def _make_prompt(
        self, request: ModelRequest, last: Turn | None, length: int
    ) -> tuple[Tokens, tuple[ImageRef, ...], Turn | None, int]:
        """Return the prompt tokens, their images, the turn that they continue, and how many of them belong to it.

        last    the turn that ends with the last assistant message, which is the ``length``-th; None if none does
        """
        if request.tokens is not None:
            turn, end = self.turns.longest_prefix(request.tokens)
            return request.tokens, () if turn is None else turn.images, turn, end
        if last is not None and (continued := self._bridge(request, last, length)) is not None:
            return continued
        rendered = self.chat_format.render(request.messages, request.tools)
        tokens, images = self._place(rendered, request.messages, start=0)
        turn, end = self.turns.longest_prefix(tokens)
        if turn is not None and turn.images != tuple(one for one in images if one.start < end):
            turn, end = None, 0  # equal placeholders may stand for other images
        return tokens, images, turn, end

    def _bridge(
        self, request: ModelRequest, turn: Turn, length: int
    ) -> tuple[Tokens, tuple[ImageRef, ...], Turn, int] | None:
        """Like ``_make_prompt``, by continuing ``turn``. None if the conversation must be rendered."""
        messages = request.messages
        more = self.chat_format.bridge(turn, messages[: length - 1], messages[length:], request.tools)
        if more is None:
            return None
        known = turn.tokens
        new, images = self._place(more, messages[length:], start=len(known))
        return np.concatenate([known, new]), (*turn.images, *images), turn, len(known)

    def _place(
        self, tokens: Sequence[int], messages: Sequence[Json], *, start: int
    ) -> tuple[Tokens, tuple[ImageRef, ...]]:
        """Return tokens with the placeholders of the messages' images, and where they are. Raises Refused."""
        if not (files := files_of(messages)):
            return np.array(tokens, np.int32), ()
        if self._images is None:
            raise Refused("the messages show images, and this model reads text alone")
        try:
            return self._images.place(tokens, files, start=start)
        except ImageError as error:
            raise Refused(f"in the messages, {error}") from None

    # -- answers -------------------------------------------------------------------------------------------------------

    async def _sample_all(self, prepared: Sequence[Prepared], numbers: Sequence[int]) -> Replies:
        tags = [self._tags.next(one.tokens) for one in prepared]
        sampling: list[Awaitable[Turn]] = [
            self._sample(one, number, tag, call=tags[0])
            for one, number, tag in zip(prepared, numbers, tags, strict=True)
        ]
        try:
            return list(await asyncio.gather(*sampling))
        except PromptError as error:
            return Refused(f"the engine refuses this prompt: {error}")

    async def _sample(self, prepared: Prepared, number: int, tag: str, *, call: str) -> Turn:
        request = prepared.request
        shown = {} if self._images is None else {"images": prepared.images}
        answer = await self._generate(prepared.tokens, max_new_tokens=prepared.limit, **shown)
        self._num_sampled += len(answer.tokens)
        message: Json = {}
        stopped_by, asked, said = "", b"", b""
        if request.tokens is None:
            message = _make_message(self.chat_format.parse(answer, context=prepared.tokens, tools=request.tools), tag)
            if request.stop and answer.finish_reason == "stop":
                stopped_by = _find_first(request.stop, self.chat_format.decode(answer.tokens.tolist()))
                _cut(message, stopped_by)
            asked, said = digests([*request.messages, message])[-2:]
            said += digest_of_tools(request.tools)
        return Turn(
            number=number,
            tag=tag,
            call=call,
            parent=prepared.parent,
            after=prepared.after,
            given=prepared.given,
            answer=answer,
            message=message,
            asked=asked,
            said=said,
            overridden=request.overridden,
            images=prepared.images,
            stopped_by=stopped_by,
        )


def _length_to_last_answer(messages: Sequence[Json]) -> int:
    """Return the number of messages up to the last of the assistant's; 0 if there is none, or none after it."""
    last = next((n for n in range(len(messages), 0, -1) if messages[n - 1]["role"] == "assistant"), 0)
    return last if last < len(messages) else 0


def _make_message(parsed: Parsed, tag: str) -> Json:
    message: Json = {"role": "assistant", "content": parsed.content}
    if parsed.reasoning is not None:
        message["reasoning_content"] = parsed.reasoning
    if parsed.calls:
        ids = parsed.call_ids or [call_id(tag, place) for place in range(len(parsed.calls))]
        message["tool_calls"] = [call(one, *made) for one, made in zip(ids, parsed.calls, strict=True)]
    return message


def _find_first(stop: Sequence[str], text: str) -> str:
    """Return the stop string that begins first in ``text``; "" if there is none."""
    return min((one for one in stop if one in text), key=text.index, default="")


def _cut(message: Json, stop: str) -> None:
    """Cut a message before the stop string that ended it, as model servers do. A stop string in a call stays."""
    name = "content" if message["content"] else "reasoning_content"
    if stop and name in message:
        message[name] = message[name].partition(stop)[0]


def _find_unreceived(records: Sequence[Record], *, is_retry: bool) -> Record | None:
    """Return the record that a repeated request asks for: one that was not received, or with ``is_retry`` the last."""
    for record in records:
        if not record.is_received and not record.is_listening():
            return record
    return records[-1] if records and is_retry else None
