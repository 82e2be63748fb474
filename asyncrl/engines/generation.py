"""What an engine samples after a prompt, complete or still in progress.

A ``PartialGeneration`` shows a generation before it is complete and lets another engine continue it. Its prefix counts
towards max_new_tokens and keeps its logprobs and the versions that sampled it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from asyncrl.messages import SamplingParams, VersionSpan, likeliest, replace
from asyncrl.messages.likeliest import NONE, Likeliest
from asyncrl.messages.routing import NO_EXPERTS, ExpertArray, join, keep_last
from asyncrl.messages.support import WHOLE, Support
from asyncrl.messages.support import join as join_supports

Version = tuple[int, int]
"""(incarnation, policy_version)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestReport:
    """What an engine says of a request besides its tokens, as far as it does.

    cached_tokens        tokens of the prompt whose keys and values the engine still had
    queue_seconds        until the engine began to process the request; None: it does not say
    first_token_seconds  until it sampled the first token, the queue included; None: it does not say
    drafted_tokens       tokens that were proposed by speculative decoding
    accepted_tokens      how many of these the model took
    """

    cached_tokens: int = 0
    queue_seconds: float | None = None
    first_token_seconds: float | None = None
    drafted_tokens: int = 0
    accepted_tokens: int = 0


NO_REPORT: Final = RequestReport()


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Tokens that an engine sampled after a prompt.

    tokens         i32[T]
    logprobs       f32[T] under the sampling distribution: over the ``support``, where there is one. In evaluations,
                   where there is none, SGLang's are of the whole distribution (for temperature 0, of temperature 1)
    finish_reason  empty while the generation is in progress
    experts        routing of the last tokens of prompt and answer (messages/routing.py); empty if the engine does not
                   report it
    report         of the request; if engines continued each other, of the last one
    support        of the tokens, if SamplingParams.reports_support
    likeliest      tokens at each place under the sampling distribution, if SamplingParams.top_logprobs
    """

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    version_spans: tuple[VersionSpan, ...]
    finish_reason: str
    experts: ExpertArray = field(default_factory=lambda: NO_EXPERTS)
    report: RequestReport = NO_REPORT
    support: Support = WHOLE
    likeliest: Likeliest = NONE

    def first(self, count: int) -> Generation:
        """Return the first ``count`` tokens, as an unfinished generation."""
        return Generation(
            tokens=self.tokens[:count],
            logprobs=self.logprobs[:count],
            version_spans=tuple(span for span in self.version_spans if span.start < count),
            finish_reason="",
            experts=self.experts[: max(0, len(self.experts) - max(0, len(self.tokens) - count))],
            report=self.report,
            support=self.support.first(count),
            likeliest=self.likeliest.first(count),
        )

    def after(self, count: int) -> Generation:
        """Return everything after the first ``count`` tokens."""
        if not count:
            return self
        spans = {max(0, span.start - count): span for span in self.version_spans}  # the last one at 0 wins
        return Generation(
            tokens=self.tokens[count:],
            logprobs=self.logprobs[count:],
            version_spans=tuple(
                replace(span, start=start) for start, span in spans.items() if start < len(self.tokens) - count
            ),
            finish_reason=self.finish_reason,
            # The token before these was routed after it was sampled.
            experts=keep_last(self.experts, len(self.tokens) - count + 1),
            report=self.report,
            support=self.support.after(count),
            likeliest=self.likeliest.after(count),
        )

    def then(self, rest: Generation) -> Generation:
        """Return the concatenation of this generation and ``rest``."""
        if not len(self.tokens):
            return rest
        spans = list(self.version_spans)
        for span in rest.version_spans:
            if (span.incarnation, span.policy_version) != (spans[-1].incarnation, spans[-1].policy_version):
                spans.append(replace(span, start=span.start + len(self.tokens)))
        return Generation(
            tokens=np.concatenate([self.tokens, rest.tokens]),
            logprobs=np.concatenate([self.logprobs, rest.logprobs]),
            version_spans=tuple(spans),
            finish_reason=rest.finish_reason,
            experts=join(self.experts, rest.experts, len(rest.tokens)),
            report=rest.report,
            support=join_supports([(len(self.tokens), self.support), (len(rest.tokens), rest.support)]),
            likeliest=likeliest.join([(len(self.tokens), self.likeliest), (len(rest.tokens), rest.likeliest)]),
        )

    def continue_from(
        self, prompt_tokens: NDArray[np.int32], sampling: SamplingParams
    ) -> tuple[NDArray[np.int32], SamplingParams]:
        """Return arguments to continue from here: prompt and tokens i32[P + T], and the sampling of the remainder."""
        if not len(self.tokens):
            return prompt_tokens, sampling
        context = np.concatenate([prompt_tokens, self.tokens]).astype(np.int32, copy=False)
        return context, sampling.after(len(self.tokens))


NOTHING: Final = Generation(
    tokens=np.zeros(0, np.int32), logprobs=np.zeros(0, np.float32), version_spans=(), finish_reason=""
)


class InProgress(Protocol):
    """An engine's view of a generation in progress. Called in the event loop at any time."""

    def __len__(self) -> int:
        """Number of tokens so far."""
        ...

    def so_far(self, begin: int = 0) -> Generation:
        """Return tokens from ``begin`` on. The cost must be proportional to these: it is called every few seconds."""
        ...


class PartialGeneration:
    """A generation in progress: created by the caller, updated by the engine that samples it.

    prefix  tokens to continue from: fewer than max_new_tokens, and the last one is not an end token
    """

    def __init__(self, prefix: Generation = NOTHING) -> None:
        self.prefix = prefix
        self._rest: InProgress | None = None

    def follow(self, rest: InProgress) -> None:
        """Called by the engine: ``rest`` is the generation in progress after the prefix."""
        self._rest = rest

    def finish(self, generation: Generation) -> None:
        """Set the complete generation."""
        self.prefix = generation
        self._rest = None

    @property
    def num_tokens(self) -> int:
        return len(self.prefix.tokens) + (len(self._rest) if self._rest is not None else 0)

    def so_far(self, begin: int = 0) -> Generation:
        """Return everything so far from token ``begin`` on.

        While in progress, this excludes the newest token: only the engine knows whether it is valid or the last one.
        """
        known = len(self.prefix.tokens)
        before = self.prefix.after(min(begin, known))
        if self._rest is None:
            return before
        rest = self._rest.so_far(max(0, begin - known))
        is_good = np.isfinite(rest.logprobs[:-1])
        return before.then(rest.first(len(is_good) if is_good.all() else int(is_good.argmin())))


@dataclass(slots=True)
class SpanRecorder:
    """Records as version spans which weights sampled which tokens of an answer.

    ``mark`` sets the version that samples from token ``start`` on; the last mark at a position wins.
    """

    marks: list[tuple[int, Version]] = field(default_factory=list)

    def mark(self, start: int, version: Version) -> None:
        while self.marks and self.marks[-1][0] >= start:
            self.marks.pop()
        if not self.marks or self.marks[-1][1] != version:
            self.marks.append((start, version))

    def spans(self, num_tokens: int, *, begin: int = 0) -> tuple[VersionSpan, ...]:
        """Return the spans of tokens ``begin`` to ``num_tokens``, with positions relative to ``begin``."""
        marks = {max(0, start - begin): version for start, version in self.marks}  # the last one at 0 wins
        return tuple(
            VersionSpan(start=start, incarnation=version[0], policy_version=version[1])
            for start, version in marks.items()
            if start < num_tokens - begin
        )


def format_version(version: Version) -> str:
    """Return the version as text: "0:12" is incarnation 0, policy version 12."""
    return f"{version[0]}:{version[1]}"
