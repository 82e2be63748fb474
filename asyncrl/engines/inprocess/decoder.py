"""Continuous batching on a Hugging Face model, one token at a time, without threads or an event loop.

``admit`` prefills new sequences into free rows and ``step`` decodes one token for every row. Between two calls, rows
may be removed or the weights replaced; sequences in progress keep their KV cache.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from asyncrl.engines.generation import SpanRecorder, Version
from asyncrl.engines.inprocess.kv_cache import ATTENTION, KVCache, attention
from asyncrl.engines.inprocess.vision import VisionLanguageModel, delta
from asyncrl.engines.stopping import StopWatch
from asyncrl.errors import ConfigError
from asyncrl.messages import SamplingParams
from asyncrl.messages.likeliest import Likeliest
from asyncrl.messages.routing import dtype_for, unrouted_rows
from asyncrl.policies.batching.images import ImagePatches
from asyncrl.tensors.exact_rows import ExactRows, use_exact_attention
from asyncrl.tensors.host_memory import HostMemory
from asyncrl.tensors.model_tensors import Shapes
from asyncrl.tensors.transformers_models import by_names_in_files, has_vision, load_model


@dataclass(slots=True, kw_only=True, eq=False)
class RunningSequence:
    """A sequence being generated.

    uniforms  one number in [0, 1) per token, drawn in advance so that samples do not depend on the rest of the batch
    support   tokens that each was sampled from, if sampling.reports_support
    likeliest at the place of each token, if sampling.top_logprobs
    experts   experts of the prompt [P, layers, k], then of each token but the last [1, layers, k]; empty if unrecorded
    stop      detects stop strings, including one that began in a prefix of the answer
    images    that the prompt shows
    """

    prompt: NDArray[np.int32]
    sampling: SamplingParams
    uniforms: list[float]
    stop: StopWatch | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    support: list[NDArray[np.int32]] = field(default_factory=list)
    likeliest: list[Likeliest] = field(default_factory=list)
    spans: SpanRecorder = field(default_factory=SpanRecorder)
    finish_reason: str = ""
    experts: list[NDArray[Any]] = field(default_factory=list)
    images: Sequence[ImagePatches] = ()
    began: float | None = None
    """When its prompt was taken up, and when its first token was there, by time.monotonic(); None: not yet."""
    first_sampled: float | None = None

    @property
    def identity(self) -> bytes:
        """What the prompt says and shows: sequences with equal ones are prefilled once."""
        return self.prompt.tobytes() + repr([(one.ref.start, one.ref.digest) for one in self.images]).encode()

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.tokens)

    @property
    def is_finite(self) -> bool:
        """False if the model returned NaN, which means that its weights are broken."""
        return bool(np.isfinite(self.logprobs).all())


class Decoder:
    """A model, its KV cache, and the sequences in its rows (row r belongs to ``answers[r]``)."""

    def __init__(
        self,
        model_path: Path,
        *,
        device: str,
        dtype: str,
        version: Version,
        reports_experts: bool = False,
        is_exact: bool = False,
    ) -> None:
        """Load the model. Raises ConfigError if it is not supported.

        reports_experts   whether to record the experts of each token, for answers to be trained
        is_exact          whether logprobs depend on a sequence's own tokens alone (tensors/exact_rows.py)
        """
        transformers.AttentionInterface.register(ATTENTION, attention)
        self.device = torch.device(device)
        self._rows_alone: contextlib.AbstractContextManager[Any] = ExactRows() if is_exact else contextlib.nullcontext()
        self._model = _read_model(model_path, dtype=dtype).to(self.device).eval().requires_grad_(False)
        if is_exact:
            use_exact_attention(self._model)
        # Tied tensors are one parameter under several names. A checkpoint holds at least one of the names.
        self._parameters: dict[str, torch.Tensor] = by_names_in_files(
            self._model.state_dict(keep_vars=True), model_type=self._model.config.model_type
        )
        self.memory = HostMemory(lambda: [*self._model.parameters(), *self._model.buffers()])
        self.end_tokens = _end_tokens(self._model)
        self.vocabulary_size = int(self._model.get_input_embeddings().weight.shape[0])
        of_text = self._model.config.get_text_config()
        self.context_tokens = int(getattr(of_text, "max_position_embeddings", None) or 2**31)
        self.version = version
        self.answers: list[RunningSequence] = []
        self._cache = KVCache()
        self._window = _window(of_text)
        self._experts = ExpertRecorder(self._model) if reports_experts else None
        self._vision = VisionLanguageModel(self._model) if has_vision(self._model.config) else None
        self._rows_changed = True
        self._lengths = self._temperatures = self._deltas = torch.empty(0)
        self.num_sampled = 0
        """Tokens sampled since the start."""

    # -- weights -------------------------------------------------------------------------------------------------------

    @property
    def shapes(self) -> Shapes:
        return {name: tuple(parameter.shape) for name, parameter in self._parameters.items()}

    @property
    def optional_names(self) -> frozenset[str]:
        """Names of tied tensors, which a checkpoint may omit."""
        first: dict[int, str] = {}
        return frozenset(
            name for name, parameter in self._parameters.items() if first.setdefault(id(parameter), name) != name
        )

    @torch.inference_mode()
    def load(self, tensors: Mapping[str, torch.Tensor], version: Version) -> None:
        """Replace the weights by tensors that match ``shapes``. Sequences in progress continue with the new weights."""
        for name, tensor in tensors.items():
            self._parameters[name].copy_(tensor)
        self.version = version
        for answer in self.answers:
            answer.spans.mark(len(answer.tokens), version)

    # -- rows ----------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def admit(self, answers: Sequence[RunningSequence]) -> None:
        """Prefill new sequences and sample the first token of each. Equal prompts are computed once."""
        numbers: dict[bytes, int] = {}
        chosen = [numbers.setdefault(answer.identity, len(numbers)) for answer in answers]
        prompts = [answers[chosen.index(number)] for number in range(len(numbers))]
        lengths = [len(one.prompt) for one in prompts]
        longest = max(lengths)
        ids = np.zeros((len(prompts), longest), dtype=np.int64)
        for row, one in enumerate(prompts):
            ids[row, : lengths[row]] = one.prompt
        first_row = len(self.answers)
        columns = max(len(answer.prompt) + answer.sampling.max_new_tokens for answer in answers)
        self._cache.reserve(rows=first_row + len(answers), columns=columns)
        self._cache.expect_prompts(torch.tensor(chosen, device=self.device), first_row=first_row)
        causal = torch.ones(longest, longest, dtype=torch.bool, device=self.device).tril()[None, None]
        last, where = torch.unique(torch.tensor(lengths, device=self.device) - 1, return_inverse=True)
        logits = self._forward(
            torch.from_numpy(ids).to(self.device),
            torch.arange(longest)[None],
            causal,
            keep=last,
            images=[one.images for one in prompts],
        )
        self.answers.extend(answers)
        for answer in answers:
            answer.spans.mark(0, self.version)
        if self._experts is not None:
            of_prompts = self._experts.take(len(prompts))
            for answer, row in zip(answers, chosen, strict=True):
                if answer.sampling.is_trained:
                    answer.experts.append(of_prompts[row, : len(answer.prompt)])
        self._rows_changed = True
        rows = torch.tensor(chosen, device=self.device)
        self._sample(answers, logits[rows, where[rows]], self._column([a.sampling.temperature or 1.0 for a in answers]))

    @torch.inference_mode()
    def step(self) -> None:
        """Sample the next token of every sequence."""
        if self._rows_changed:
            self._lengths = torch.tensor([answer.num_tokens - 1 for answer in self.answers], device=self.device)
            self._temperatures = self._column([answer.sampling.temperature or 1.0 for answer in self.answers])
            self._deltas = torch.tensor([delta(len(one.prompt), one.images) for one in self.answers])
            self._rows_changed = False
        longest = max(answer.num_tokens for answer in self.answers) - 1
        self._cache.expect_tokens(self._lengths, longest=longest)
        ids = torch.tensor([answer.tokens[-1] for answer in self.answers], device=self.device)[:, None]
        positions = self._lengths[:, None]
        visible = torch.arange(longest + 1, device=self.device) <= positions
        logits = self._forward(ids, positions, visible[:, None, None], keep=1)
        self._lengths = self._lengths + 1
        if self._experts is not None:
            for answer, experts in zip(self.answers, self._experts.take(len(self.answers)), strict=True):
                if answer.sampling.is_trained:
                    answer.experts.append(experts)
        self._sample(self.answers, logits[:, 0], self._temperatures)

    @torch.inference_mode()
    def remove(self, leaving: Collection[RunningSequence]) -> None:
        """Free the rows of these sequences; the last rows move into the gaps."""
        if not leaving:
            return
        rows = [row for row, answer in enumerate(self.answers) if answer in leaving]
        for row in reversed(rows):
            if not self.answers[row].is_finite:
                self._cache.scrub(row)
            last = self.answers.pop()
            if row < len(self.answers):
                self._cache.move(source=len(self.answers), target=row, length=last.num_tokens - 1)
                self.answers[row] = last
        self._rows_changed = True

    # -- one pass ------------------------------------------------------------------------------------------------------

    def _forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor,
        *,
        keep: int | torch.Tensor,
        images: Sequence[Sequence[ImagePatches]] = (),
    ) -> torch.Tensor:
        """Return logits [n, kept, V].  images: of each prompt, in a prefill"""
        if self._vision is not None:
            return self._forward_images(self._vision, ids, positions, mask, keep=keep, images=images)
        with self._rows_alone:
            result: torch.Tensor = self._model(
                input_ids=ids,
                position_ids=positions.to(self.device),
                attention_mask=mask if self._window is None else self._by_kind(mask, positions, self._window),
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=keep,
            ).logits
        return result

    def _forward_images(
        self,
        model: VisionLanguageModel,
        ids: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor,
        *,
        keep: int | torch.Tensor,
        images: Sequence[Sequence[ImagePatches]],
    ) -> torch.Tensor:
        """As ``_forward``, for a vision-language model."""
        if images:
            arguments = model.prefill(ids, images)
        else:
            arguments = {"input_ids": ids, "position_ids": positions + self._deltas.to(self.device)[:, None]}
        hidden = model.hidden(**arguments, attention_mask=mask, past_key_values=self._cache, use_cache=True)
        kept = hidden[:, -keep:] if isinstance(keep, int) else hidden[:, keep]
        logits: torch.Tensor = self._model.get_output_embeddings()(kept)
        return logits

    def _by_kind(self, mask: torch.Tensor, positions: torch.Tensor, window: int) -> dict[str, torch.Tensor]:
        """Return the mask of each kind of layer for queries at ``positions`` [n, tokens].

        The cache keeps all tokens for both kinds.
        """
        columns = torch.arange(mask.shape[-1], device=self.device)
        within = columns > positions.to(self.device)[:, None, :, None] - window
        return {"full_attention": mask, "sliding_attention": mask & within}

    def _sample(self, answers: Sequence[RunningSequence], logits: torch.Tensor, temperatures: torch.Tensor) -> None:
        """Append to each sequence a token drawn from softmax(logits / temperature) by inverting the cumulative sum."""
        logits = logits.float()
        for row, answer in enumerate(answers):
            sampling = answer.sampling
            if sampling.min_new_tokens or sampling.changes or not sampling.temperature:
                logits[row] = reshape_logits(logits[row], sampling, answer.tokens, ends=self._end_tokens_of(sampling))
            if sampling.reports_support:
                answer.support.append(logits[row].isfinite().nonzero()[:, 0].cpu().numpy().astype(np.int32))
        with self._rows_alone:
            logprobs = torch.log_softmax(logits / temperatures, dim=-1)
        for row, answer in enumerate(answers):
            if answer.sampling.top_logprobs:
                answer.likeliest.append(_likeliest(logprobs[row], answer.sampling.top_logprobs))
        cumulative = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)
        uniforms = self._column([answer.uniforms[len(answer.tokens)] for answer in answers], dtype=torch.float64)
        chosen = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)
        chosen.clamp_(max=logits.shape[-1] - 1)
        tokens, values = chosen[:, 0].tolist(), logprobs.gather(1, chosen)[:, 0].tolist()
        self.num_sampled += len(answers)
        for answer, token, logprob in zip(answers, tokens, values, strict=True):
            answer.tokens.append(token)
            answer.logprobs.append(logprob)
            if token in self._end_tokens_of(answer.sampling) or (
                answer.stop is not None and answer.stop.is_ended_by(token)
            ):
                answer.finish_reason = "stop"
            elif len(answer.tokens) >= answer.sampling.max_new_tokens:
                answer.finish_reason = "length"

    def _end_tokens_of(self, sampling: SamplingParams) -> frozenset[int]:
        """Return the token ids that end an answer."""
        if sampling.ignore_eos:
            return frozenset()
        return self.end_tokens | set(sampling.stop_token_ids) if sampling.stop_token_ids else self.end_tokens

    def _column(self, values: list[float], *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)[:, None]


def _read_model(path: Path, *, dtype: str) -> Any:
    """Load the model. Raises ConfigError."""
    try:
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
        of_parts = {"text_config": ATTENTION, "vision_config": "sdpa"}
        model = load_model(
            path, dtype=getattr(torch, dtype), attn_implementation=of_parts if has_vision(config) else ATTENTION
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model.path={path}: {error}") from error
    _require_attention(config, path)
    return model


def check_attention(path: Path) -> None:
    """Raise ConfigError for a model whose attention the engine does not have. Ignores a folder that cannot be read."""
    try:
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError, KeyError):
        return
    _require_attention(config, path)


def _require_attention(config: Any, path: Path) -> None:
    if other := _other_attention(config.get_text_config()):
        raise ConfigError(
            f"model.path={path}: the in-process engine does not support {other}, which this {config.model_type} has; "
            "use engine.kind = 'sglang'"
        )


def _other_attention(config: Any) -> str:
    """Name the attention feature of the model that ``attention`` would silently ignore; "" if there is none."""
    if others := sorted(_kinds(config) - {"full_attention", "sliding_attention"}):
        return ", ".join(others)
    if getattr(config, "sliding_window", None) and not hasattr(config, "layer_types"):
        return "a sliding window in every layer"
    return "attn_logit_softcapping" if getattr(config, "attn_logit_softcapping", None) else ""


def _kinds(config: Any) -> set[str]:
    return set(getattr(config, "layer_types", None) or ["full_attention"])


def _window(config: Any) -> int | None:
    """Return how many tokens a query sees in layers with a sliding window; None if no layer has one."""
    return int(config.sliding_window) if "sliding_attention" in _kinds(config) else None


def _end_tokens(model: Any) -> frozenset[int]:
    """Return the token ids that end a sequence, from the config and the generation config."""
    found: set[int] = set()
    for config in (model.config, model.config.get_text_config(), getattr(model, "generation_config", None)):
        ids = getattr(config, "eos_token_id", None)
        found.update([ids] if isinstance(ids, int) else ids or [])
    return frozenset(found)


class ExpertRecorder:
    """Records which experts each token is routed to, so that the learner can replay the routing (messages/routing.py).

    Hooks every mixture of a model and reads its inputs: hidden states [n, H], experts [n, k], scores [n, k].
    """

    def __init__(self, model: Any) -> None:
        self._layers = len(model.model.layers)
        self._chosen: dict[int, torch.Tensor] = {}
        sizes = []
        for number, layer in enumerate(model.model.layers):
            if (experts := getattr(layer.mlp, "experts", None)) is not None:
                experts.register_forward_pre_hook(partial(self._note, number))
                sizes.append(experts.num_experts)
        self._dtype = dtype_for(max(sizes))

    def _note(self, layer: int, _module: Any, arguments: tuple[torch.Tensor, ...]) -> None:
        self._chosen[layer] = arguments[1]

    def take(self, rows: int) -> NDArray[Any]:
        """Return the experts of the last pass, which had ``rows`` rows of n tokens: [rows, n, layers, k]."""
        some = next(iter(self._chosen.values()))
        found = unrouted_rows(len(some), like=np.empty((0, self._layers, some.shape[1]), self._dtype))
        for layer, chosen in self._chosen.items():
            found[:, layer] = chosen.cpu().numpy()
        self._chosen.clear()
        return found.reshape(rows, -1, *found.shape[1:])


def reshape_logits(
    logits: torch.Tensor, sampling: SamplingParams, tokens: Sequence[int], *, ends: Collection[int]
) -> torch.Tensor:
    """Return logits [V] whose softmax, after division by the temperature, is the sampling distribution.

    As in SGLang: penalties on the logits, then temperature, then what both top_k and top_p keep. Penalties count the
    tokens of the answer only, without the prompt.

    tokens  the answer so far
    ends    tokens that end an answer
    """
    if len(tokens) < sampling.min_new_tokens:
        logits = logits.clone()
        logits[list(ends)] = -torch.inf
    if not sampling.changes and sampling.temperature:
        return logits
    logits = _penalize(logits, sampling, tokens)
    if not sampling.temperature:
        return torch.full_like(logits, -torch.inf).index_fill_(0, logits.argmax(keepdim=True), 0.0)
    if sampling.most_kept or sampling.top_p < 1:
        values, order = torch.softmax(logits / sampling.temperature, -1).sort(descending=True)
        is_out = values.cumsum(-1) - values > sampling.top_p  # keeps the first token that exceeds top_p
        is_out[sampling.most_kept or len(logits) :] = True
        logits = logits.index_fill(0, order[is_out], -torch.inf)
    return logits


def _likeliest(logprobs: torch.Tensor, count: int) -> Likeliest:
    """Return the ``count`` likeliest tokens of one place.  logprobs: f32[V]"""
    values, tokens = logprobs.topk(min(count, len(logprobs)))
    return Likeliest(tokens=tokens[None].int().cpu().numpy(), logprobs=values[None].cpu().numpy())


def _penalize(logits: torch.Tensor, sampling: SamplingParams, tokens: Sequence[int]) -> torch.Tensor:
    counts = torch.bincount(torch.tensor(tokens, dtype=torch.int64), minlength=len(logits)).to(logits)
    logits = logits - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)
    if sampling.repetition_penalty == 1:
        return logits
    scaled = torch.where(logits < 0, logits * sampling.repetition_penalty, logits / sampling.repetition_penalty)
    return torch.where(counts > 0, scaled, logits)
