"""Measure the search for stop strings in a long answer: milliseconds of the event loop or an engine's decode thread.

    python -m benchmarks.stop_strings [--tokens 8192] [--repeats 20]

Uses a byte-level BPE of 8,000 tokens, made from this repository's docs, and an answer with such a text. Each row shows:
the position of the stop string; the time of one decode of the whole answer; the former method, decoding the whole
answer and bisecting; the current method, once for a finished answer and token by token while it grows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from asyncrl.engines.stopping import StopStrings

STOP = "<|the end|>"


def tokenizer() -> Any:
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=8000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train([str(path) for path in sorted(Path("docs").rglob("*.md"))], trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, clean_up_tokenization_spaces=False)


def bisected(tokens: Sequence[int], decode: Callable[[Sequence[int]], str]) -> int | None:
    """The former method: decode the whole text, the text without the last token, then bisect the rest."""

    def has_stop(length: int) -> bool:
        return STOP in decode(tokens[:length])

    if not has_stop(len(tokens)):
        return None
    low, high = 0, len(tokens)
    if not has_stop(high - 1):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if has_stop(middle) else (middle, high)
    return high


def watched(tokens: Sequence[int], decode: Callable[[Sequence[int]], str]) -> int | None:
    watch = StopStrings([STOP], decode).watch()
    return next((n for n, token in enumerate(tokens, 1) if watch.is_ended_by(token)), None)


def milliseconds(work: Callable[[], object], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return 1e3 * statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    made = tokenizer()
    text = "\n".join(path.read_text() for path in sorted(Path("docs").rglob("*.md")))

    def decode(tokens: Sequence[int]) -> str:
        return str(made.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    stop = made.encode(STOP)
    plain = made.encode(text)[: options.tokens]
    answers = {
        "nowhere": plain,
        "at the end": plain[: -len(stop)] + stop,
        "in the middle": plain[: len(plain) // 2] + stop + plain[len(plain) // 2 : -len(stop)],
    }
    print(
        f"{'stop string':16}{'tokens':>8}{'one decode':>12}{'before':>10}{'now':>10}{'faster':>9}{'token by token':>16}"
    )
    for where, tokens in answers.items():
        now = StopStrings([STOP], decode)
        assert now.length(tokens) == bisected(tokens, decode) == watched(tokens, decode)
        taken = {
            "one_decode_ms": milliseconds(partial(decode, tokens), options.repeats),
            "before_ms": milliseconds(partial(bisected, tokens, decode), options.repeats),
            "now_ms": milliseconds(partial(now.length, tokens), options.repeats),
            "token_by_token_ms": milliseconds(partial(watched, tokens, decode), 3),
        }
        faster = taken["before_ms"] / taken["now_ms"]
        print(
            f"{where:16}{len(tokens):8}{taken['one_decode_ms']:12.2f}{taken['before_ms']:10.2f}{taken['now_ms']:10.2f}"
            f"{faster:8.1f}×{taken['token_by_token_ms']:16.1f}"
        )
        rounded = {name: round(value, 3) for name, value in taken.items()}
        print(json.dumps({"stop": where, "tokens": len(tokens), **rounded}))


if __name__ == "__main__":
    main()
