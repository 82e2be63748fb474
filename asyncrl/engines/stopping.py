"""Where an answer ends besides its end token: stop strings and stop token ids.

An answer ends with the first token with which its text contains a stop string. That token is in the answer whole, with
its logprob, and so are those before it: what the engine sampled is what is trained. Which token that is follows from
the answer's tokens alone, so an answer ends at the same token in every engine, and when it goes on after a prefix.

Every token is decoded about once, behind the few before it: a letter may be several tokens, and what a token gives may
depend on the one before.

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
from asyncrl.messages import SamplingParams
from asyncrl.protocols import Generation

Decode = Callable[[Sequence[int]], str]

_UNFINISHED: Final = "\N{REPLACEMENT CHARACTER}"
_LONGEST_LETTER: Final = 8
"""Tokens that may belong to one letter. What is not whole behind more of them never will be."""
_KEPT_CONTEXT: Final = 24
_LEAST_CONTEXT: Final = 4
_MOST_CONTEXT: Final = 64
"""Tokens that the next ones are decoded behind: as many as are kept anyway; of longer texts the least, or more where
those begin within a letter."""
_BLOCKS: Final = (256, 16, 1)
"""Tokens that are decoded together; where a stop string ends among them, in smaller blocks."""
AT_ONCE: Final = 256
"""Tokens of an answer whose text the event loop looks at itself."""


@dataclass(frozen=True, slots=True)
class _Read:
    """How far a text was read.

    context  the last tokens whose text is whole, and what they decode to by themselves
    pending  tokens behind them that end within a letter
    tail     the end of the whole text, in which a stop string may have begun
    """

    context: tuple[int, ...] = ()
    of_context: str = ""
    pending: tuple[int, ...] = ()
    tail: str = ""


class StopStrings:
    """The stop strings of one request. ``decode``: the text of tokens, special tokens included."""

    def __init__(self, strings: Sequence[str], decode: Decode) -> None:
        self._strings, self._decode = tuple(strings), decode
        self._most_begun = max(map(len, strings)) - 1
        self._most_before = max(len(text.encode()) for text in strings) + _MOST_CONTEXT

    def length(self, tokens: Sequence[int]) -> int | None:
        """Tokens up to the one that completes a stop string, that one included; None: there is none."""
        return self._length(tokens, _Read(), _BLOCKS)

    def watch(self, before: Sequence[int] = ()) -> StopWatch:
        """Of an answer that goes on behind the tokens ``before``, which complete none."""
        last = before[-self._most_before :]
        return StopWatch(self, self.read(_Read(), last)[0] if last else _Read())

    def read(self, done: _Read, tokens: Sequence[int]) -> tuple[_Read, bool]:
        """Read on, and whether a stop string is in the text of ``tokens``, or ends there."""
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
        """The last of ``tokens``, from the beginning of a letter on, and their text."""
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
            if is_ended:  # in this block, or in what was pending before it
                first = start - len(done.pending)
                before = replace(done, pending=())
                found = self._length(tokens[first : start + size], before, tuple(smaller))
                if found is not None:
                    return first + found
            done = after
        return None


class StopWatch:
    """Reads an answer while it grows."""

    def __init__(self, strings: StopStrings, done: _Read) -> None:
        self._strings, self._done = strings, done

    def is_ended_by(self, token: int) -> bool:
        """Whether the answer's next token completes a stop string. To be asked of every token, in order."""
        self._done, is_ended = self._strings.read(self._done, (token,))
        return is_ended


def ended(generation: Generation, sampling: SamplingParams, stop: StopStrings | None) -> Generation:
    """The answer up to where it ends by ``sampling``, when the engine saw that late or not at all.

    A server does not see a stop string that began in tokens it was given as a prompt, and says "length" of an answer
    that stops at its last token.
    """
    length = None if stop is None else stop.length(generation.tokens.tolist())
    if length is None and int(generation.tokens[-1]) in sampling.stop_token_ids:
        length = len(generation.tokens)
    if length is None or generation.finish_reason not in ("stop", "length"):
        return generation
    return replace(generation.first(length), finish_reason="stop")


class StopReader:
    """Makes the stop strings of requests, with the tokenizer in the model's folder, which the first of them reads."""

    def __init__(self, model_path: Path, reader: Executor) -> None:
        self._model_path, self._reader = model_path, reader
        self._decode: Decode | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine-stops")

    async def strings(self, sampling: SamplingParams) -> StopStrings | None:
        """None without stop strings. Raises ConfigError."""
        if not sampling.stop:
            return None
        if self._decode is None:
            self._decode = await asyncio.get_running_loop().run_in_executor(self._reader, load_decode, self._model_path)
        return StopStrings(sampling.stop, self._decode)

    async def ended(self, generation: Generation, sampling: SamplingParams, stop: StopStrings | None) -> Generation:
        """As ``ended``; a long answer is read in a thread."""
        if stop is None or len(generation.tokens) <= AT_ONCE:
            return ended(generation, sampling, stop)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, ended, generation, sampling, stop)

    def close(self) -> None:
        self._thread.shutdown(wait=False)
