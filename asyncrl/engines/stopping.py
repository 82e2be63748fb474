"""Ends answers at stop strings and stop token ids, in addition to the end token.

An answer ends with the first token that completes a stop string in its text. The answer keeps that whole token with its
logprob, and all tokens before it, so training sees exactly what the engine sampled. The position depends only on the
answer's tokens. So an answer ends at the same token in every engine, and also when it continues a prefix.

Each token is decoded about once, together with a few preceding tokens: a character may consist of several tokens, and
the text of a token may depend on the token before it.

Tests: tests/unit/engines/test_stopping.py, tests/contracts/test_engine_stops.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from asyncrl.data.tokenizer import load_decode
from asyncrl.engines.generation import Generation
from asyncrl.messages import SamplingParams

Decode = Callable[[Sequence[int]], str]

_UNFINISHED: Final = "\N{REPLACEMENT CHARACTER}"
_LONGEST_LETTER: Final = 8
"""Most tokens that one character may consist of. A character that is incomplete after more tokens stays incomplete."""
_KEPT_CONTEXT: Final = 24
_LEAST_CONTEXT: Final = 4
_MOST_CONTEXT: Final = 64
"""Tokens of context that further tokens are decoded with. Up to _KEPT_CONTEXT tokens are all kept. Of a longer text the
last _LEAST_CONTEXT are kept, or up to _MOST_CONTEXT if these begin within a character."""
_BLOCKS: Final = (256, 16, 1)
"""Tokens decoded together. If a stop string ends within a block, the block is read again in smaller blocks."""
AT_ONCE: Final = 256
"""Answers of up to this many tokens are decoded on the event loop; longer answers in a thread."""


@dataclass(frozen=True, slots=True)
class _Read:
    """How far a text has been read.

    context     last tokens whose text is complete
    of_context  text of ``context``, decoded by itself
    pending     tokens after ``context`` that end within a character
    tail        end of the text so far, in which a stop string may have begun
    """

    context: tuple[int, ...] = ()
    of_context: str = ""
    pending: tuple[int, ...] = ()
    tail: str = ""


class StopStrings:
    """The stop strings of one request. ``decode`` returns the text of tokens, special tokens included."""

    def __init__(self, strings: Sequence[str], decode: Decode) -> None:
        self._strings = tuple(strings)
        self._decode = decode
        self._most_begun = max(map(len, strings)) - 1
        self._most_before = max(len(text.encode()) for text in strings) + _MOST_CONTEXT

    def length(self, tokens: Sequence[int]) -> int | None:
        """Return the number of tokens up to and including the one that completes a stop string, or None."""
        return self._length(tokens, _Read(), _BLOCKS)

    def watch(self, before: Sequence[int] = ()) -> StopWatch:
        """Return a watch for an answer that continues the tokens ``before``, which complete no stop string."""
        last = before[-self._most_before :]
        return StopWatch(self, self.read(_Read(), last)[0] if last else _Read())

    def read(self, done: _Read, tokens: Sequence[int]) -> tuple[_Read, bool]:
        """Read ``tokens``. Returns the new state, and whether a stop string ends in their text."""
        pending = (*done.pending, *tokens)
        read = (*done.context, *pending)
        of_read = self._decode(read)
        text = of_read[len(done.of_context) :]
        seen = done.tail + text
        is_ended = any(string in seen for string in self._strings)
        is_whole = text != "" and not text.endswith(_UNFINISHED)
        if not is_whole and len(pending) < len(tokens) + _LONGEST_LETTER:
            return replace(done, pending=pending), is_ended
        tail = seen[-self._most_begun :] if self._most_begun else ""
        context, of_context = (read, of_read) if len(read) <= _KEPT_CONTEXT else self._context(read)
        return _Read(context, of_context, (), tail), is_ended

    def _context(self, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], str]:
        """Return the last of ``tokens``, starting at the beginning of a character, and their text."""
        size = _LEAST_CONTEXT
        while True:
            text = self._decode(tokens[-size:])
            if not text.startswith(_UNFINISHED) or size >= min(_MOST_CONTEXT, len(tokens)):
                return tokens[-size:], text
            size *= 2

    def _length(self, tokens: Sequence[int], done: _Read, blocks: tuple[int, ...]) -> int | None:
        size, *smaller = blocks
        for start in range(0, len(tokens), size):
            after, is_ended = self.read(done, tokens[start : start + size])
            if is_ended and not smaller:
                return start + 1
            if is_ended:  # in this block, or in the tokens that were pending before it
                first = start - len(done.pending)
                before = replace(done, pending=())
                found = self._length(tokens[first : start + size], before, tuple(smaller))
                if found is not None:
                    return first + found
            done = after
        return None


class StopWatch:
    """Follows an answer while it grows."""

    def __init__(self, strings: StopStrings, done: _Read) -> None:
        self._strings = strings
        self._done = done

    def is_ended_by(self, token: int) -> bool:
        """Return whether the next token completes a stop string. Must be called for every token, in order."""
        self._done, is_ended = self._strings.read(self._done, (token,))
        return is_ended


def cut_at_stop(generation: Generation, sampling: SamplingParams, stop: StopStrings | None) -> Generation:
    """Return the answer cut where ``sampling`` ends it, for engines that detect the end late or not at all.

    A server misses a stop string that began in tokens it received as part of the prompt. It reports "length" for an
    answer whose last allowed token is a stop token.
    """
    length = None if stop is None else stop.length(generation.tokens.tolist())
    if length is None and int(generation.tokens[-1]) in sampling.stop_token_ids:
        length = len(generation.tokens)
    if length is None or generation.finish_reason not in ("stop", "length"):
        return generation
    return replace(generation.first(length), finish_reason="stop")


class StopReader:
    """Creates the stop strings of requests. The first request loads the tokenizer from the model's folder."""

    def __init__(self, model_path: Path, reader: Executor) -> None:
        self._model_path = model_path
        self._reader = reader
        self._decode: Decode | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine-stops")

    async def strings(self, sampling: SamplingParams) -> StopStrings | None:
        """Return the request's stop strings, or None if it has none. Raises ConfigError."""
        if not sampling.stop:
            return None
        if self._decode is None:
            self._decode = await asyncio.get_running_loop().run_in_executor(self._reader, load_decode, self._model_path)
        return StopStrings(sampling.stop, self._decode)

    async def cut(self, generation: Generation, sampling: SamplingParams, stop: StopStrings | None) -> Generation:
        """Like the function ``ended``; long answers are decoded in a thread."""
        if stop is None or len(generation.tokens) <= AT_ONCE:
            return cut_at_stop(generation, sampling, stop)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, cut_at_stop, generation, sampling, stop)

    def close(self) -> None:
        self._thread.shutdown(wait=False)
