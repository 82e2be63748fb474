"""Continuous batching on a Hugging Face model, one token at a time, without threads or an event loop.

``admit`` prefills new sequences into new rows and ``step`` decodes one token for every row. Between two calls, rows may
be removed or the weights replaced; sequences in progress keep their keys and values.

Rows are padded on the left, so the newest token of every row is in the last column of transformers' DynamicCache:

    admit [5 9 7]                5 9 7
    step                         5 9 7 a
    admit [4] and [6 6 6 6 6]    . 5 9 7 a      the cache grows on the left to the longest row
                                 . . . . 4
                                 6 6 6 6 6
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch.nn import functional as F
from transformers.cache_utils import DynamicCache

from asyncrl.engines.generation import SpanRecorder, Version
from asyncrl.engines.stopping import StopWatch
from asyncrl.errors import ConfigError
from asyncrl.messages import SamplingParams
from asyncrl.messages.routing import NO_EXPERTS, ExpertArray, dtype_for, unrouted_rows
from asyncrl.tensors.host_memory import HostMemory
from asyncrl.tensors.model_tensors import Shapes
from asyncrl.tensors.transformers_models import LOADING, by_names_in_files


@dataclass(slots=True, kw_only=True, eq=False)
class RunningSequence:
    """A sequence being generated.

    uniforms  one number in [0, 1) per token, drawn in advance so that samples do not depend on the rest of the batch
    experts   experts of the prompt [P, layers, k], then of each token but the last [1, layers, k]; empty if unrecorded
    stop      detects stop strings, including one that began in a prefix of the answer
    """

    prompt: NDArray[np.int32]
    sampling: SamplingParams
    uniforms: list[float]
    stop: StopWatch | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: SpanRecorder = field(default_factory=SpanRecorder)
    finish_reason: str = ""
    experts: list[NDArray[Any]] = field(default_factory=list)

    def experts_of(self, begin: int, end: int) -> ExpertArray:
        """Return the experts of tokens ``begin`` - 1 to ``end`` - 1; with ``begin`` = 0, of the prompt and the answer.

        The last token is marked unrouted, because the model has not processed it yet.
        """
        if begin >= end or not self.experts:
            return NO_EXPERTS
        routed = self.experts[begin:end]
        return np.concatenate([*routed, unrouted_rows(1, like=routed[0])])

    @property
    def is_finite(self) -> bool:
        """False if the model returned NaN, which means that its weights are broken."""
        return bool(np.isfinite(self.logprobs).all())


class Decoder:
    """A model and the sequences in its cache (row r belongs to ``answers[r]``)."""

    def __init__(
        self, model_path: Path, *, device: str, dtype: str, version: Version, reports_experts: bool = False
    ) -> None:
        """Load the model. Raises ConfigError if it is not supported.

        reports_experts   whether to record the experts of each token, for answers to be trained
        """
        self.device = torch.device(device)
        self._model = _read_model(model_path, dtype=dtype).to(self.device).eval().requires_grad_(False)
        # Tied tensors are one parameter under several names. A checkpoint holds at least one of the names.
        self._parameters: dict[str, torch.Tensor] = by_names_in_files(
            self._model.state_dict(keep_vars=True), model_type=self._model.config.model_type
        )
        self.memory = HostMemory(lambda: [*self._model.parameters(), *self._model.buffers()])
        self.end_tokens = _end_tokens(self._model)
        self.vocabulary_size = int(self._model.get_input_embeddings().weight.shape[0])
        self.context_tokens = int(getattr(self._model.config, "max_position_embeddings", None) or 2**31)
        self.version = version
        self.answers: list[RunningSequence] = []
        self._cache = DynamicCache()
        self._mask = torch.zeros(0, 0, dtype=torch.bool, device=self.device)
        """Which columns of the cache hold tokens of a row, bool[rows, columns]."""
        self._experts = ExpertRecorder(self._model) if reports_experts else None
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
        prompts: dict[bytes, int] = {}
        chosen = [prompts.setdefault(answer.prompt.tobytes(), len(prompts)) for answer in answers]
        longest = max(len(answer.prompt) for answer in answers)
        ids = np.zeros((len(prompts), longest), dtype=np.int64)
        mask = np.zeros((len(prompts), longest), dtype=np.bool_)
        for answer, row in zip(answers, chosen, strict=True):
            ids[row, longest - len(answer.prompt) :] = answer.prompt
            mask[row, longest - len(answer.prompt) :] = True
        cache, rows = DynamicCache(), torch.tensor(chosen, device=self.device)
        known = torch.from_numpy(mask).to(self.device)
        logits = self._forward(torch.from_numpy(ids).to(self.device), known, cache)
        cache.batch_select_indices(rows)
        self._append(cache, known[rows])
        self.answers.extend(answers)
        experts = self._experts.take(len(prompts)) if self._experts is not None else None
        for answer, row in zip(answers, chosen, strict=True):
            answer.spans.mark(0, self.version)
            if experts is not None and answer.sampling.is_trained:
                answer.experts.append(experts[row, longest - len(answer.prompt) :])
        self._sample(answers, logits[rows])

    @torch.inference_mode()
    def step(self) -> None:
        """Sample the next token of every sequence."""
        ids = torch.tensor([answer.tokens[-1] for answer in self.answers], device=self.device)[:, None]
        self._mask = F.pad(self._mask, (0, 1), value=True)
        logits = self._forward(ids, self._mask, self._cache)
        if self._experts is not None:
            for answer, experts in zip(self.answers, self._experts.take(len(self.answers)), strict=True):
                if answer.sampling.is_trained:
                    answer.experts.append(experts)
        self._sample(self.answers, logits)

    @torch.inference_mode()
    def remove(self, leaving: Collection[RunningSequence]) -> None:
        """Free the rows of these sequences, and the columns that only they used."""
        if not leaving:
            return
        kept = [row for row, answer in enumerate(self.answers) if answer not in leaving]
        self.answers = [self.answers[row] for row in kept]
        if not kept:
            self._cache, self._mask = DynamicCache(), self._mask[:0, :0]
            return
        rows = torch.tensor(kept, device=self.device)
        first = int(self._mask[rows].any(0).int().argmax())
        self._mask = self._mask[rows, first:]
        for layer in self._cache.layers:
            layer.keys, layer.values = layer.keys[rows, :, first:], layer.values[rows, :, first:]

    def _append(self, cache: DynamicCache, mask: torch.Tensor) -> None:
        """Add rows below those in the cache."""
        if not self.answers:
            self._cache, self._mask = cache, mask
            return
        columns = max(self._mask.shape[1], mask.shape[1])
        self._mask = torch.cat([F.pad(one, (columns - one.shape[1], 0)) for one in (self._mask, mask)])
        for layer, new in zip(self._cache.layers, cache.layers, strict=True):
            layer.keys, layer.values = (
                torch.cat([F.pad(one, (0, 0, columns - one.shape[2], 0)) for one in pair])
                for pair in ((layer.keys, new.keys), (layer.values, new.values))
            )

    # -- one pass ------------------------------------------------------------------------------------------------------

    def _forward(self, ids: torch.Tensor, mask: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        """Return the logits [rows, V] after the last of ``ids`` [rows, tokens], which are appended to ``cache``.

        mask: bool[rows, columns] of the cache with these tokens
        """
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        result: torch.Tensor = self._model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        return result[:, 0]

    def _sample(self, answers: Sequence[RunningSequence], logits: torch.Tensor) -> None:
        """Append to each sequence a token drawn from softmax(logits / temperature) by inverting the cumulative sum."""
        logits = logits.float()
        for row, answer in enumerate(answers):
            sampling = answer.sampling
            if sampling.min_new_tokens or sampling.changes or not sampling.temperature:
                logits[row] = reshape_logits(logits[row], sampling, answer.tokens, ends=self._end_tokens_of(sampling))
        temperatures = self._column([answer.sampling.temperature or 1.0 for answer in answers])
        logprobs = torch.log_softmax(logits / temperatures, dim=-1)
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
        with LOADING:
            model = transformers.AutoModelForCausalLM.from_pretrained(path, config=config, dtype=getattr(torch, dtype))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model.path={path}: {error}") from error
    if others := set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}:
        raise ConfigError(
            f"model.path={path}: the in-process engine does not support {', '.join(sorted(others))}, which this "
            f"{config.model_type} has; use engine.kind = 'sglang'"
        )
    return model


def _end_tokens(model: Any) -> frozenset[int]:
    """Return the token ids that end a sequence, from the config and the generation config."""
    found: set[int] = set()
    for config in (model.config, getattr(model, "generation_config", None)):
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

    The order is SGLang's: penalties on the logits, then temperature, top_k and top_p. Penalties count the tokens of the
    answer only, without the prompt.

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
    if sampling.top_k:
        kth = logits.topk(min(sampling.top_k, len(logits))).values[-1]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if sampling.top_p < 1:
        values, order = torch.softmax(logits / sampling.temperature, -1).sort(descending=True)
        is_out = values.cumsum(-1) - values > sampling.top_p  # keeps the first token that exceeds top_p
        logits = logits.index_fill(0, order[is_out], -torch.inf)
    return logits


def _penalize(logits: torch.Tensor, sampling: SamplingParams, tokens: Sequence[int]) -> torch.Tensor:
    counts = torch.bincount(torch.tensor(tokens, dtype=torch.int64), minlength=len(logits)).to(logits)
    logits = logits - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)
    if sampling.repetition_penalty == 1:
        return logits
    scaled = torch.where(logits < 0, logits * sampling.repetition_penalty, logits / sampling.repetition_penalty)
    return torch.where(counts > 0, scaled, logits)
