"""Where an answer ends besides its end token: stop strings and stop token ids.

An answer ends with the first token with which its text contains a stop string. That token is in the answer whole, with
its logprob, and so are those before it: what the engine sampled is what is trained. Which token that is follows from
the answer's tokens alone, so an answer ends at the same token in every engine, and when it goes on after a prefix.

Tests: tests/unit/engines/test_stopping.py, tests/contracts/test_engine_stops.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, Final

from asyncrl.errors import ConfigError
from asyncrl.messages import SamplingParams
from asyncrl.protocols import Generation

Decode = Callable[[Sequence[int]], str]

_MARGIN: Final = 4
"""Tokens before the longest stop string: the first ones of a text that is cut out may decode to something else."""


class StopStrings:
    """The stop strings of one request. ``decode``: the text of tokens, special tokens included."""

    def __init__(self, strings: Sequence[str], decode: Decode) -> None:
        self._strings, self._decode = tuple(strings), decode
        self.window = max(len(text.encode()) for text in strings) + _MARGIN
        """Tokens in which a stop string that the last one completes lies whole: each has a byte of it at least."""

    def is_ended_by_last(self, tokens: Sequence[int]) -> bool:
        """Whether the text of ``tokens``, which did not contain a stop string before the last one, does now."""
        return self._is_in(tokens[-self.window :])

    def length(self, tokens: Sequence[int]) -> int | None:
        """Tokens up to the one that completes a stop string, that one included; None: there is none."""
        if not self._is_in(tokens):
            return None
        low, high = 0, len(tokens)  # no stop string in the first ``low``, one in the first ``high``
        if not self._is_in(tokens[:-1]):
            return high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._is_in(tokens[:middle]) else (middle, high)
        return high

    def _is_in(self, tokens: Sequence[int]) -> bool:
        text = self._decode(tokens)
        return any(string in text for string in self._strings)


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
    cut = generation.first(length)
    return Generation(tokens=cut.tokens, logprobs=cut.logprobs, version_spans=cut.version_spans, finish_reason="stop")


class StopReader:
    """Makes the stop strings of requests, with the tokenizer in the model's folder, which the first of them reads."""

    def __init__(self, model_path: Path, reader: Executor) -> None:
        self._model_path, self._reader = model_path, reader
        self._decode: Decode | None = None

    async def strings(self, sampling: SamplingParams) -> StopStrings | None:
        """None without stop strings. Raises ConfigError."""
        if not sampling.stop:
            return None
        if self._decode is None:
            self._decode = await asyncio.get_running_loop().run_in_executor(self._reader, _decode_of, self._model_path)
        return StopStrings(sampling.stop, self._decode)


def _decode_of(model_path: Path) -> Decode:
    """Raises ConfigError."""
    import transformers

    try:
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
            model_path, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError(f"rollout.stop needs the tokenizer in {model_path}: {error}") from error

    def decode(tokens: Sequence[int]) -> str:
        text: str = tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    return decode
