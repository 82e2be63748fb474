"""Parses an SGLang server's replies into tokens, logprobs and version spans. Pure: does no I/O.

A reply arrives whole, or as chunks that repeat everything so far or carry only new tokens.

The version of the weights that sampled a token comes from one of two sources:
spans   ``weight_versions`` in the whole reply, from the scheduler (0.5.23). With the overlap scheduler, one token is
        sampled but not yet counted when the weights change. So every span but the first starts one token later here,
        unless its weights are older than those before.
stream  each chunk is stamped with the server's version at that time, which is trusted once it has settled (settled.py).
        A chunk is labelled with the older of its stamp and that of the previous chunk, because the weights may change
        within a chunk.
Neither label is ever newer than the weights that sampled the token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from asyncrl.engines.generation import Generation
from asyncrl.engines.sglang.routed_experts import ExpertShape
from asyncrl.engines.sglang.stamps import Stamps
from asyncrl.engines.version_spans import SpanRecorder, Version
from asyncrl.errors import EngineError, PromptError
from asyncrl.messages.routing import NO_EXPERTS, ExpertArray, keep_last


class Reply:
    """A reply while it arrives.

    sent_version       version of the weights when the request was sent; no token is older
    stamps             how the server names versions
    keeps_version      all tokens have ``sent_version``; with adapters the server reports only the version of its model
    experts            shape of the model's experts, if the server reports the experts of each token
    num_prompt_tokens  prompt tokens of the request
    """

    def __init__(
        self,
        *,
        sent_version: Version,
        stamps: Stamps,
        keeps_version: bool = False,
        experts: ExpertShape | None = None,
        num_prompt_tokens: int = 0,
    ) -> None:
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._spans = SpanRecorder()
        self._spans.mark(0, sent_version)
        self._sent_version = self._stamp = sent_version
        self._stamps = stamps
        self._keeps_version = keeps_version
        self._finish: Mapping[str, Any] | None = None
        self._expert_shape, self._num_prompt_tokens = experts, num_prompt_tokens
        self._experts: ExpertArray = NO_EXPERTS

    def __len__(self) -> int:
        return len(self._tokens)

    def take_whole(self, body: Mapping[str, Any], *, late_tokens: int) -> None:
        """Read a whole reply with spans. ``late_tokens`` is 1 with the overlap scheduler, else 0."""
        self._take_tokens(body)
        self._take_spans(body, late_tokens=late_tokens)

    def _take_spans(self, body: Mapping[str, Any], *, late_tokens: int) -> None:
        before = self._sent_version
        for span in body["meta_info"].get("weight_versions") or ():  # a request that was aborted in the queue has none
            version = self._version(span["version"])
            if (span["start"], version) != (0, self._stamp):
                self._spans.mark(span["start"] + (late_tokens if version > before else 0), version)
            before = version

    def take_chunk(self, body: Mapping[str, Any], *, newest: Version, late_tokens: int | None = None) -> Version:
        """Read a streamed chunk and label it with its stamp or that of the previous chunk, whichever is older.

        Returns the stamp of this chunk.

        newest       newest settled version; newer stamps count as this version
        late_tokens  as in ``take_whole``, for servers that put exact spans into the last chunk
        """
        before = len(self._tokens)
        self._take_tokens(body)
        stamp = self._version(str(body["meta_info"].get("weight_version", "")))
        if len(self._tokens) > before:
            settled = min(stamp, newest)
            self._spans.mark(before, min(self._stamp, settled))
            self._stamp = settled
        if late_tokens is not None and "weight_versions" in body["meta_info"]:
            self._spans, self._stamp = SpanRecorder([(0, self._sent_version)]), self._sent_version
            self._take_spans(body, late_tokens=late_tokens)
        return stamp

    def so_far(self, begin: int = 0) -> Generation:
        return Generation(
            tokens=np.array(self._tokens[begin:], dtype=np.int32),
            logprobs=np.array(self._logprobs[begin:], dtype=np.float32),
            version_spans=self._spans.spans(len(self._tokens), begin=begin),
            finish_reason=str(self._finish.get("type")) if self._finish is not None else "",
            experts=keep_last(self._experts, len(self._tokens) - begin + 1) if begin else self._experts,
        )

    def generation(self) -> Generation:
        """Return the complete answer. Raises EngineError if it is incomplete, failed, or has no logprobs."""
        if self._finish is None:
            raise EngineError("the server's reply ended before the generation finished")
        reason = str(self._finish.get("type"))
        if reason not in ("stop", "length", "abort"):
            raise EngineError(f"the server finished a generation with {self._finish}")
        if not self._tokens:
            raise EngineError(f"the server failed the request: {self._finish.get('message') or reason}")
        generation = self.so_far()
        if not np.isfinite(generation.logprobs).all():
            raise EngineError("the server returned NaN logprobs: its weights are broken")
        return generation

    def _take_tokens(self, body: Mapping[str, Any]) -> None:
        _raise_failure(body)
        meta = body["meta_info"]
        entries = meta.get("output_token_logprobs") or []
        # Whether a chunk repeats tokens or not, it ends at the number of tokens so far.
        begin = int(meta["completion_tokens"]) - len(entries)
        if not 0 <= begin <= len(self._tokens):
            raise EngineError(f"the server skipped tokens: got {len(self._tokens)}, the next chunk starts at {begin}")
        self._tokens[begin:] = [int(entry[1]) for entry in entries]
        self._logprobs[begin:] = [float("nan") if entry[0] is None else float(entry[0]) for entry in entries]
        self._finish = meta.get("finish_reason")
        if self._expert_shape is not None and (text := meta.get("routed_experts")):
            num_tokens = self._num_prompt_tokens + len(self._tokens)
            self._experts = self._expert_shape.read(text, num_tokens=num_tokens)

    def _version(self, text: str) -> Version:
        version = self._stamps.read(text)
        return self._sent_version if self._keeps_version else version


def _raise_failure(body: Mapping[str, Any]) -> None:
    """Raise what the server reports instead of an answer: PromptError if it refuses the request, else EngineError.

    Such a chunk may count a token that it does not carry, so this comes before its tokens.
    """
    if "error" in body:
        error = body["error"] if isinstance(body["error"], Mapping) else {"message": body["error"]}
        status, message = error.get("code"), error.get("message")
    else:
        finish = body["meta_info"].get("finish_reason") or {}
        status, message = finish.get("status_code"), finish.get("message")
        if not isinstance(status, int) or status < 400:
            return
    kind = PromptError if status == 400 else EngineError
    raise kind(f"the server failed the request: {message or status}")
