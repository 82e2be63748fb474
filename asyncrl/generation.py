"""What an engine samples after a prompt: whole, or still growing.

A ``Partial`` is how a generation is seen before it is done, and how another engine goes on from where it was seen last:
its prefix counts towards max_new_tokens, and keeps its logprobs and the versions that sampled it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from asyncrl.messages import Sampling, VersionSpan, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What an engine sampled after a prompt.  tokens i32[T], logprobs f32[T] of the distribution sampled from.

    ``finish_reason`` is empty while more may come.
    """

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    version_spans: tuple[VersionSpan, ...]
    finish_reason: str

    def first(self, count: int) -> Generation:
        """Its first ``count`` tokens, unfinished."""
        return Generation(
            tokens=self.tokens[:count],
            logprobs=self.logprobs[:count],
            version_spans=tuple(span for span in self.version_spans if span.start < count),
            finish_reason="",
        )

    def after(self, count: int) -> Generation:
        """What comes after its first ``count`` tokens."""
        if not count:
            return self
        spans = {max(0, span.start - count): span for span in self.version_spans}  # of several at 0 the last
        return Generation(
            tokens=self.tokens[count:],
            logprobs=self.logprobs[count:],
            version_spans=tuple(
                replace(span, start=start) for start, span in spans.items() if start < len(self.tokens) - count
            ),
            finish_reason=self.finish_reason,
        )

    def then(self, rest: Generation) -> Generation:
        """This and what was sampled after it, as one."""
        if not len(self.tokens):
            return rest
        spans = list(self.version_spans)
        for span in rest.version_spans:
            if (span.run_epoch, span.policy_version) != (spans[-1].run_epoch, spans[-1].policy_version):
                spans.append(replace(span, start=span.start + len(self.tokens)))
        return Generation(
            tokens=np.concatenate([self.tokens, rest.tokens]),
            logprobs=np.concatenate([self.logprobs, rest.logprobs]),
            version_spans=tuple(spans),
            finish_reason=rest.finish_reason,
        )

    def left_of(self, prompt_tokens: NDArray[np.int32], sampling: Sampling) -> tuple[NDArray[np.int32], Sampling]:
        """What to ask for to go on from here: prompt and tokens i32[P + T], and max_new_tokens less T."""
        if not len(self.tokens):
            return prompt_tokens, sampling
        context = np.concatenate([prompt_tokens, self.tokens]).astype(np.int32, copy=False)
        return context, replace(sampling, max_new_tokens=sampling.max_new_tokens - len(self.tokens))


NOTHING: Final = Generation(
    tokens=np.zeros(0, np.int32), logprobs=np.zeros(0, np.float32), version_spans=(), finish_reason=""
)


class Growing(Protocol):
    """What an engine has of a generation in progress. Asked in the event loop at any time."""

    def __len__(self) -> int:
        """Tokens so far."""
        ...

    def so_far(self, begin: int = 0) -> Generation:
        """Those from ``begin`` on, at a cost of those alone: it is asked every few seconds."""
        ...


class Partial:
    """One generation in progress: made by who asks for it, followed by the engine that samples it.

    prefix  what it goes on from: fewer tokens than max_new_tokens, the last of them no end
    """

    def __init__(self, prefix: Generation = NOTHING) -> None:
        self.prefix = prefix
        self._rest: Growing | None = None

    def follow(self, rest: Growing) -> None:
        """The engine's: ``rest`` is what comes after the prefix."""
        self._rest = rest

    def finish(self, generation: Generation) -> None:
        """It is done and this is all of it."""
        self.prefix, self._rest = generation, None

    @property
    def num_tokens(self) -> int:
        return len(self.prefix.tokens) + (len(self._rest) if self._rest is not None else 0)

    def so_far(self, begin: int = 0) -> Generation:
        """What it has from token ``begin`` on.

        While it grows without the newest token: whether that ends it, or is any good, only its engine knows.
        """
        known = len(self.prefix.tokens)
        before = self.prefix.after(min(begin, known))
        if self._rest is None:
            return before
        rest = self._rest.so_far(max(0, begin - known))
        is_good = np.isfinite(rest.logprobs[:-1])
        return before.then(rest.first(len(is_good) if is_good.all() else int(is_good.argmin())))
