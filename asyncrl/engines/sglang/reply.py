"""Requests to /generate of an SGLang server, and its replies as tokens, logprobs, version spans and experts. No I/O.

A reply arrives whole, or as chunks that repeat everything so far or carry only new tokens.

The version of the weights that sampled a token comes from one of two sources:
spans   ``weight_versions`` in the whole reply, from the scheduler (0.5.23). With the overlap scheduler, one token is
        sampled but not yet counted when the weights change. So every span but the first starts one token later here,
        unless its weights are older than those before.
stream  each chunk is stamped with the server's version at that time, which is trusted once it has settled
        (versions.py). A chunk is labelled with the older of its stamp and that of the previous chunk, because the
        weights may change within a chunk.
Neither label is ever newer than the weights that sampled the token.
"""

from __future__ import annotations

import base64
import binascii
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.data.model_folder import ExpertCounts
from asyncrl.engines.generation import NO_REPORT, Generation, RequestReport, SpanRecorder, Version
from asyncrl.engines.sglang.versions import Stamps
from asyncrl.errors import ConfigError, EngineError, PromptError
from asyncrl.messages import SamplingParams
from asyncrl.messages.likeliest import Likeliest
from asyncrl.messages.routing import NO_EXPERTS, ExpertArray, dtype_for, keep_last, unrouted
from asyncrl.messages.support import Support


def sampling_params(sampling: SamplingParams, *, vocabulary_size: int) -> dict[str, Any]:
    """Set every parameter explicitly: the server may take defaults from the model's generation_config.json."""
    keeps_all = not 0 < sampling.most_kept < vocabulary_size  # a number of more than 32 bits ends the server
    return {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": -1 if keeps_all and not sampling.reports_support else min(sampling.most_kept, vocabulary_size),
        "min_p": 0.0,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "ignore_eos": sampling.ignore_eos,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "min_new_tokens": sampling.min_new_tokens,
    }


def generate_request(
    prompt_tokens: NDArray[np.int32],
    sampling: SamplingParams,
    *,
    seed: int,
    vocabulary_size: int,
    stream: bool,
    stream_interval: int | None,
    reports_experts: bool,
    extra_key: str,
) -> dict[str, Any]:
    """Return the body of a POST to /generate. If ``stream_interval`` is None, the server uses its own."""
    interval = {} if stream_interval is None else {"stream_interval": stream_interval}
    return {
        "rid": uuid.uuid4().hex,
        "input_ids": prompt_tokens.tolist(),
        "sampling_params": sampling_params(sampling, vocabulary_size=vocabulary_size)
        | {"sampling_seed": seed}
        | interval,
        "return_logprob": True,
        "return_routed_experts": reports_experts,
        "return_sampling_mask": sampling.reports_support,
        **({"top_logprobs_num": min(sampling.top_logprobs, vocabulary_size)} if sampling.top_logprobs else {}),
        "stream": stream,
        "extra_key": extra_key,
    }


EXPERTS_OPTION: Final = "enable-return-routed-experts"
"""Server option that enables this."""


def read_experts(text: str, model: ExpertCounts, *, num_tokens: int) -> ExpertArray:
    """Return [num_tokens, layers, per token] for prompt and answer, the last token unrouted. Raises EngineError.

    text  base64 of int32 [num_tokens - 1, layers, per token]

    The server keeps the experts of a token alongside its KV cache. So a token sampled before a weight load keeps its
    original experts, and a prefix found in the cache has the experts that its keys were computed with. The server
    reports experts only when an answer is finished. If another engine continues an unfinished answer, the experts of
    the prefix are computed again.

    The server sends zeros where no router chose: for dense layers, and for layers of other pipeline stages. With one
    expert per token, these zeros look like expert 0; the learner ignores the experts of dense layers.
    """
    sizes = model.num_layers, model.experts_per_token
    try:
        routed = np.frombuffer(base64.b64decode(text, validate=True), "<i4").reshape(-1, *sizes)[: num_tokens - 1]
    except (ValueError, binascii.Error) as error:
        raise EngineError(f"the server's routed experts are not those of this model: {error}") from error
    dtype = dtype_for(model.num_experts)
    found = np.full((num_tokens, *sizes), unrouted(np.empty(0, dtype)), dtype)
    is_chosen = (routed >= 0).all(-1) & (routed < model.num_experts).all(-1)
    if model.experts_per_token > 1:
        is_chosen &= routed.any(-1)
    found[: len(routed)][is_chosen] = routed[is_chosen]
    return found


class Reply:
    """A reply while it arrives.

    sent_version       version of the weights when the request was sent; no token is older
    stamps             how the server names versions
    keeps_version      all tokens have ``sent_version``; with adapters the server reports only the version of its model
    experts            counts of the model's experts, if the server reports the experts of each token
    num_prompt_tokens  prompt tokens of the request
    has_support        whether the support of each token is asked for
    has_likeliest      whether the likeliest tokens at each place are asked for
    held_seconds       how long the request waited before it was sent
    """

    def __init__(
        self,
        *,
        sent_version: Version,
        stamps: Stamps,
        keeps_version: bool = False,
        experts: ExpertCounts | None = None,
        num_prompt_tokens: int = 0,
        has_support: bool = False,
        has_likeliest: bool = False,
        held_seconds: float = 0.0,
    ) -> None:
        self._has_support = has_support
        self._has_likeliest = has_likeliest
        self._likeliest: list[list[tuple[float, int]]] = []
        self._supports: list[list[int]] = []
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._spans = SpanRecorder()
        self._spans.mark(0, sent_version)
        self._sent_version = self._stamp = sent_version
        self._stamps = stamps
        self._keeps_version = keeps_version
        self._finish: Mapping[str, Any] | None = None
        self._expert_counts = experts
        self._num_prompt_tokens = num_prompt_tokens
        self._experts: ExpertArray = NO_EXPERTS
        self._held_seconds = held_seconds
        self._report = NO_REPORT

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def num_context_tokens(self) -> int:
        """Tokens that the next one attends to."""
        return self._num_prompt_tokens + len(self)

    def take_whole(self, body: Mapping[str, Any], *, late_tokens: int) -> None:
        """Read a whole reply with spans.  late_tokens: see checks.late_tokens"""
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
            self._spans = SpanRecorder([(0, self._sent_version)])
            self._stamp = self._sent_version
            self._take_spans(body, late_tokens=late_tokens)
        return stamp

    def so_far(self, begin: int = 0) -> Generation:
        return Generation(
            tokens=np.array(self._tokens[begin:], dtype=np.int32),
            logprobs=np.array(self._logprobs[begin:], dtype=np.float32),
            version_spans=self._spans.spans(len(self._tokens), begin=begin),
            finish_reason=str(self._finish.get("type")) if self._finish is not None else "",
            experts=keep_last(self._experts, len(self._tokens) - begin + 1) if begin else self._experts,
            report=self._report,
            support=Support.of(self._supports[begin:]),
            likeliest=Likeliest.of(self._likeliest[begin:]),
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
        self._logprobs[begin:] = [_number(entry[0]) for entry in entries]
        if self._has_support:
            self._take_supports(meta, entries)
        if self._has_likeliest:
            self._take_likeliest(meta, len(entries))
        self._finish = meta.get("finish_reason")
        self._report = read_report(meta, held_seconds=self._held_seconds)
        self._check_prompt(meta)
        if self._expert_counts is not None and (text := meta.get("routed_experts")):
            num_tokens = self._num_prompt_tokens + len(self._tokens)
            self._experts = read_experts(text, self._expert_counts, num_tokens=num_tokens)

    def _check_prompt(self, meta: Mapping[str, Any]) -> None:
        """Raise PromptError unless the server has read as many tokens as were sent, with those of images."""
        read = meta.get("prompt_tokens", self._num_prompt_tokens)
        if self._num_prompt_tokens and read != self._num_prompt_tokens:
            raise PromptError(
                f"the server read {read} tokens of a prompt of {self._num_prompt_tokens}: its image processor makes "
                "other patches than the learner's; does it have the same preprocessor_config.json?"
            )

    def _take_supports(self, meta: Mapping[str, Any], entries: Sequence[Any]) -> None:
        """Read what each token was sampled from, and its logprob among these: ``entries`` have it of all tokens."""
        supports, logprobs = require_support(meta)
        begin = len(self._tokens) - len(supports)
        if len(supports) != len(logprobs) or not 0 <= begin <= len(self._supports):
            raise EngineError(f"the server's supports are of {len(supports)} tokens, of {len(entries)}")
        self._supports[begin:] = supports
        self._logprobs[begin:] = [float(logprob) for logprob in logprobs]

    def _take_likeliest(self, meta: Mapping[str, Any], num_new: int) -> None:
        """Read the likeliest tokens at the place of each, as [logprob, token, text]."""
        places = meta.get("output_top_logprobs") or []
        begin = len(self._tokens) - len(places)
        if len(places) < num_new or not 0 <= begin <= len(self._likeliest):
            raise EngineError(f"the server gave the likeliest tokens at {len(places)} places, of {num_new}")
        self._likeliest[begin:] = [[(_number(one[0]), int(one[1])) for one in place] for place in places]

    def _version(self, text: str) -> Version:
        version = self._stamps.read(text)
        return self._sent_version if self._keeps_version else version


def read_report(meta: Mapping[str, Any], *, held_seconds: float) -> RequestReport:
    """Return what the server says of a request: times with enable-metrics, and with its last tokens alone."""
    queue, first = meta.get("queue_time"), meta.get("first_token_latency")
    return RequestReport(
        cached_tokens=int(meta.get("cached_tokens") or 0),
        queue_seconds=None if queue is None else held_seconds + float(queue),
        first_token_seconds=None if first is None else held_seconds + float(first),
        drafted_tokens=int(meta.get("spec_num_proposed_drafts") or 0),
        accepted_tokens=int(meta.get("spec_num_correct_drafts") or 0),
    )


def names_experts(meta: Mapping[str, Any], model: ExpertCounts, *, num_tokens: int) -> bool:
    """Return whether a whole reply says which experts any of its tokens, prompt included, was routed to.

    SGLang reports zeros if a kernel of the experts chooses them itself: triton_kernel, its default for gpt-oss on
    Hopper, and flashinfer's trtllm (forward_cuda in layers/moe/topk.py of 0.5.16 and 0.5.23).
    """
    if not (text := meta.get("routed_experts")):
        return False
    found = read_experts(text, model, num_tokens=num_tokens)
    return bool((found != unrouted(found)).any())


def require_support(meta: Mapping[str, Any]) -> tuple[list[list[int]], list[float]]:
    """Return what each token of a reply was sampled from, and its logprob among these. Raises ConfigError."""
    supports, logprobs = meta.get("output_token_sampling_mask"), meta.get("output_token_sampling_logprobs")
    if supports is None or logprobs is None:
        raise ConfigError(
            "rollout.top_p, top_k: this SGLang does not say which tokens it sampled from (return_sampling_mask of "
            "0.5.23), and the trainer needs them; use top_p = 1.0, top_k = 0, or a newer SGLang"
        )
    return supports, logprobs


def _number(logprob: float | None) -> float:
    """Return a logprob of the server, whose JSON has null for NaN."""
    return float("nan") if logprob is None else float(logprob)


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
