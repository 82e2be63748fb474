"""The reference backend: one process, plain PyTorch, Hugging Face models. Other backends are tested against it.

A step computes logprobs or values of the response tokens, and the objective of each micro-batch. Gradients are summed
over micro-batches in float32 and clipped by global norm. AdamW updates float32 weights, which are then rounded to the
model's dtype.

A checkpoint, state.safetensors, holds each weight under ``value|NAME``, AdamW's state under ``step|NAME``,
``exp_avg|NAME`` and ``exp_avg_sq|NAME``, and the random generators under ``random|cpu`` and ``random|cuda``.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from asyncrl.backends import micro_batches, models, vision
from asyncrl.backends.adapter import BackendAdapter
from asyncrl.backends.frozen import is_trained
from asyncrl.backends.kernels.support import exclude
from asyncrl.backends.micro_batches import PackedRow, RecordedTokens
from asyncrl.backends.models import INDEX, POLICY, AuxiliaryModel
from asyncrl.backends.optimizer_settings import (
    NO_MOMENTS,
    OptimizerSettings,
    has_weight_decay,
    is_trainable,
    reshape_moments,
    step_metrics,
)
from asyncrl.backends.port import StepResult
from asyncrl.backends.reference_indexer import replace_indexers
from asyncrl.data.model_folder import OF_REFERENCE_ALONE
from asyncrl.errors import BackendError, CheckpointError, ConfigError
from asyncrl.policies.algorithms.algorithm import Algorithm
from asyncrl.policies.algorithms.objective import Objective
from asyncrl.policies.batching.packing import MicroBatch
from asyncrl.policies.corrections import diagnostics
from asyncrl.tensors.device import set_threads
from asyncrl.tensors.exact_rows import ExactRows, use_exact_attention
from asyncrl.tensors.host_memory import HostMemory
from asyncrl.tensors.snapshot import Snapshot
from asyncrl.tensors.transformers_models import by_names_in_files, load_model

STATE_FILE: Final = "state.safetensors"
log = logging.getLogger("asyncrl.learner")
_MOMENTS: Final = ("step", "exp_avg", "exp_avg_sq")  # of torch.optim.AdamW


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """[learner.options] of the reference backend: none."""


class ReferenceBackend(BackendAdapter):
    """Trains any causal language model that transformers loads."""

    options_type = Options

    def __init__(
        self,
        model_path: Path,
        *,
        algorithm: Algorithm,
        optimizer: OptimizerSettings,
        temperature: float,
        device: str,
        dtype: str,
        threads: int,
        options: Options,
        auxiliary: Mapping[str, AuxiliaryModel] | None = None,
        exact_ranks: int = 0,
    ) -> None:
        """exact_ranks: ranks of each engine, whose logprobs are computed to the bit (run.exact); 0: not to the bit"""
        policy = AuxiliaryModel(path=model_path, objective=algorithm, optimizer=optimizer)
        self._models = models.with_policy(policy, auxiliary or {})
        self._temperature = temperature
        self._device = torch.device(device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu")
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._threads = threads
        self._exact_ranks = exact_ranks
        self._loaded: dict[str, LoadedModel] = {}
        self._trained: dict[str, TrainedModel] = {}
        self._saved: dict[str, TrainedModel | RefreshedModel] = {}
        self._memory = HostMemory(lambda: itertools.chain.from_iterable(one.tensors() for one in self._loaded.values()))

    def start(self) -> None:
        set_threads(self._threads)
        for name, model in self._models.items():
            kind = TrainedModel if model.is_trained else RefreshedModel if model.is_refreshed else LoadedModel
            loaded = kind(
                name,
                model,
                temperature=self._temperature,
                device=self._device,
                dtype=self._dtype,
                exact_ranks=self._exact_ranks if name == POLICY else 0,  # engines have no other model
            )
            self._loaded[name] = loaded
            if isinstance(loaded, TrainedModel):
                self._trained[name] = loaded
            if isinstance(loaded, TrainedModel | RefreshedModel):
                self._saved[name] = loaded

    def step(
        self, dp_shards: Sequence[Sequence[MicroBatch]], *, learning_rate: float, model: str = POLICY
    ) -> StepResult:
        return models.find(self._trained, model, doing="step").step(_only(dp_shards), learning_rate=learning_rate)

    def refresh_reference(self) -> None:
        reference = models.find(self._loaded, "reference", doing="refresh")
        assert isinstance(reference, RefreshedModel)
        reference.copy_from(self._trained[POLICY])

    def reset_optimizer(self) -> None:
        for trained in self._trained.values():
            trained.forget_moments()

    def forward(
        self, dp_shards: Sequence[Sequence[MicroBatch]], *, model: str = POLICY
    ) -> list[list[NDArray[np.float32]]]:
        loaded = models.find(self._loaded, model, doing="forward")
        return [[loaded.forward(micro_batch) for micro_batch in _only(dp_shards)]]

    def export(self) -> Snapshot:
        policy = self._trained[POLICY]
        tensors = by_names_in_files({**policy.parameters, **policy.buffers}, model_type=policy.model_type)
        return Snapshot.from_tensors(tensors.items(), dtype=self._dtype, kept=policy.buffers)

    def save(self, folder: Path) -> None:
        for name, model in self._saved.items():
            model.save(models.saved_in(folder, name))

    def restore(self, folder: Path) -> None:
        models.require_saved(folder, self._saved)
        for name, model in self._saved.items():
            model.restore(models.saved_in(folder, name))

    def offload(self) -> None:
        self._memory.offload()

    def onload(self) -> None:
        self._memory.onload()

    def close(self) -> None:
        """Do nothing."""


def _only(dp_shards: Sequence[Sequence[MicroBatch]]) -> Sequence[MicroBatch]:
    if len(dp_shards) != 1:
        raise BackendError(f"the reference backend has one rank but got {len(dp_shards)} shards; set learner.ranks = 1")
    return dp_shards[0]


def _log_softmax(logits: torch.Tensor, temperature: float | torch.Tensor) -> torch.Tensor:
    """logits [M, V], temperature one or [M, 1] -> f32[M, V]."""
    return torch.log_softmax(logits.float() / temperature, dim=-1)


@torch.no_grad()
def _require_plain_logits(causal: Any, *, where: str) -> None:
    """Raise ConfigError unless a model's logits are what its output layer makes of the last hidden states.

    Some architectures scale or cap them, as config.json asks.
    """
    tokens = torch.arange(4, device=causal.device)[None] % causal.config.vocab_size
    hidden = causal.base_model(input_ids=tokens, use_cache=False).last_hidden_state
    if not torch.allclose(causal(tokens, use_cache=False).logits, causal.get_output_embeddings()(hidden), rtol=1e-2):
        raise ConfigError(f"{where}: its {type(causal).__name__} changes logits after the output layer; not supported")


class LoadedModel:
    """The model in a Hugging Face folder, with its output layer or a value head."""

    def __init__(
        self,
        name: str,
        model: AuxiliaryModel,
        *,
        temperature: float,
        device: torch.device,
        dtype: torch.dtype,
        exact_ranks: int,
    ) -> None:
        self._temperature = temperature
        self._device = device
        self._is_exact_on_gpu = exact_ranks > 0 and device.type == "cuda"
        self._run_dtype = dtype
        dtype = torch.float32 if self._is_exact_on_gpu else dtype  # values of 16 bits in tensors of 32
        try:
            causal: Any = load_model(model.path, dtype=dtype).to(device)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{models.where(name)}: transformers cannot load {model.path}: {error}") from None
        causal.get_input_embeddings().padding_idx = None  # transformers does not train the pad token's embedding
        replace_indexers(causal)
        causal.eval()  # no dropout: trainer logprobs must be the policy's
        if causal.config.architectures and causal.config.architectures[0] in OF_REFERENCE_ALONE:
            _require_plain_logits(causal, where=models.where(name))
        self._rows_alone: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._log_softmax: Callable[[torch.Tensor, float | torch.Tensor], torch.Tensor] = _log_softmax
        self._decoded_tokens: Callable[[torch.Tensor], Sequence[Any]] | None = None
        """What exact attention needs to know of tokens that an engine decoded."""
        if exact_ranks:
            self._compute_as_engines(causal, exact_ranks)
        self.model_type: str = causal.config.model_type
        self._decoder = causal.base_model
        self._output_layer = causal.get_output_embeddings() if model.head == "logprobs" else None
        self._value_head: torch.nn.Parameter | None = None
        self.parameters: dict[str, torch.nn.Parameter] = dict(causal.named_parameters())
        self._all_buffers = list(causal.buffers())
        named = dict(causal.named_parameters(remove_duplicate=False))
        self.buffers = {name: one for name, one in causal.state_dict(keep_vars=True).items() if name not in named}
        if model.head == "values":
            self._value_head = torch.nn.Parameter(
                torch.zeros(1, causal.config.get_text_config().hidden_size, device=device, dtype=dtype)
            )
            decoder = self._decoder.named_parameters(prefix=causal.base_model_prefix)
            self.parameters = {**dict(decoder), models.VALUE_HEAD: self._value_head}

    def _compute_as_engines(self, causal: Any, ranks: int) -> None:
        """Have logprobs be those of engines with so many ranks, to the bit."""
        if not self._is_exact_on_gpu:
            self._rows_alone = ExactRows
            use_exact_attention(causal)
            return
        from asyncrl.backends.kernels import sglang_rows  # imports SGLang

        self._decoded_tokens = sglang_rows.decoded_tokens
        self._rows_alone = sglang_rows.sglang_rows
        self._log_softmax = sglang_rows.log_softmax
        sglang_rows.use_attention(causal)
        sglang_rows.divide_products(causal, ranks)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield all tensors that the model keeps on the device between calls."""
        yield from self.parameters.values()
        yield from self._all_buffers

    @torch.no_grad()
    def forward(self, micro_batch: MicroBatch) -> NDArray[np.float32]:
        """f32[N], see Backend.forward."""
        rows = micro_batches.predicted_rows(micro_batch)
        row = self._row(micro_batch, rows)
        if self._value_head is not None:
            return self._values(row).cpu().numpy()
        result = np.zeros(micro_batch.num_tokens, np.float32)
        result[rows] = self._token_logprobs(row)[0].cpu().numpy()
        return result

    def _row(self, micro_batch: MicroBatch, rows: NDArray[np.int64]) -> PackedRow:
        return PackedRow.from_micro_batch(micro_batch, rows, device=self._device, in_rectangles=True)

    def _outputs(self, row: PackedRow) -> tuple[torch.Tensor, ...]:
        """Return logprobs and entropy f32[M] of ``row.rows``, or the value after every token f32[N]."""
        return self._token_logprobs(row) if self._value_head is None else (self._values(row),)

    def _hidden(self, row: PackedRow) -> torch.Tensor:
        """Return the last hidden state of every token, [N, H]."""
        assert row.layout is not None
        with self._rows_alone():
            decode = _WithImages.from_row(self._decoder, row) if len(row.images) else self._decode_text
            rectangles = [decode(row, indices).flatten(0, 1) for indices in row.layout.indices]
        return torch.cat(rectangles)[row.layout.order]

    def _decode_text(self, row: PackedRow, indices: torch.Tensor) -> torch.Tensor:
        """Return the last hidden states of some of the row's tokens, sequences [B, L] -> [B, L, H]."""
        attended = {"decoded": self._decoded_tokens(row.is_decoded[indices])} if self._decoded_tokens else {}
        decoder = self._decoder
        hidden: torch.Tensor = decoder(input_ids=row.tokens[indices], use_cache=False, **attended).last_hidden_state
        return hidden

    def _values(self, row: PackedRow) -> torch.Tensor:
        """Return the value after each token, f32[N]."""
        assert self._value_head is not None
        return self._hidden(row).float() @ self._value_head[0].float()

    def _token_logprobs(self, row: PackedRow) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logprob and entropy of the tokens at ``row.rows``, f32[M] each, from the hidden state before each."""
        return self._with_logits(row)[:2]

    def _with_logits(self, row: PackedRow) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return logprob and entropy f32[M], and the logits / temperature f32[M, V] that they are of."""
        assert self._output_layer is not None
        hidden, temperature = self._hidden(row)[row.rows - 1], row.distribution.temperature(self._temperature)
        with self._rows_alone():
            logits = self._output_layer(hidden)
            if row.distribution.support is not None:
                logits = exclude(logits.float(), *row.distribution.support)
            distribution = self._log_softmax(logits, temperature)
        logprobs = distribution.gather(-1, row.tokens[row.rows][:, None])[:, 0]
        entropy = -(distribution.exp() * distribution).sum(-1)
        return logprobs, entropy, logits.float() / temperature


@dataclass(frozen=True, slots=True, kw_only=True)
class _WithImages:
    """A row that shows images, as the text model of a transformers model with a vision tower takes it.

    embeddings  f[N, H], with the features of images in their places
    positions   i64[3, N]
    shown       i64[N]: which of the placeholder tokens each token is; -1 for text
    of_layers   f[placeholder tokens, H] for each of the first layers
    """

    model: Any
    embeddings: torch.Tensor
    positions: torch.Tensor
    shown: torch.Tensor
    of_layers: list[torch.Tensor]

    @classmethod
    def from_row(cls, model: Any, row: PackedRow) -> _WithImages:
        device, images = row.tokens.device, row.images
        features, places = torch.from_numpy(images.feature_rows).to(device), torch.from_numpy(images.token_rows)
        own, *of_layers = (one.index_select(0, features) for one in vision.features(model.visual, images))
        shown = torch.full(row.tokens.shape, -1)
        shown[places] = torch.arange(len(places))
        embeddings = model.get_input_embeddings()(row.tokens)
        return cls(
            model=model.language_model,
            embeddings=embeddings.index_copy(0, places.to(device), own.to(embeddings.dtype)),
            positions=torch.from_numpy(images.positions).long().to(device),
            shown=shown.to(device),
            of_layers=of_layers,
        )

    def __call__(self, row: PackedRow, indices: torch.Tensor) -> torch.Tensor:
        """See LoadedModel._decode_text."""
        shown = self.shown[indices]
        of_layers: dict[str, Any] = {}
        if self.of_layers:
            of_layers["visual_pos_masks"] = shown >= 0
            of_layers["deepstack_visual_embeds"] = [one[shown[shown >= 0]] for one in self.of_layers]
        hidden: torch.Tensor = self.model(
            inputs_embeds=self.embeddings[indices],
            position_ids=self.positions[:, indices],
            use_cache=False,
            **of_layers,
        ).last_hidden_state
        return hidden


class RefreshedModel(LoadedModel):
    """A frozen model that becomes the policy now and then. Its checkpoint holds only the weights."""

    @torch.no_grad()
    def copy_from(self, policy: TrainedModel) -> None:
        for name, tensor in self._weights().items():
            tensor.copy_({**policy.parameters, **policy.buffers}[name])

    def save(self, folder: Path) -> None:
        _write_state({f"value|{name}": _plain(tensor) for name, tensor in self._weights().items()}, folder)

    @torch.no_grad()
    def restore(self, folder: Path) -> None:
        saved = read_state(folder)
        for name, tensor in self._weights().items():
            if f"value|{name}" not in saved or saved[f"value|{name}"].numel() != tensor.numel():
                raise CheckpointError(f"{folder}: {name} is not that of the reference; is it of another model?")
            tensor.copy_(saved[f"value|{name}"].view(tensor.shape))

    def _weights(self) -> dict[str, torch.Tensor]:
        return {**self.parameters, **self.buffers}


class TrainedModel(LoadedModel):
    """A model that is trained."""

    def __init__(self, name: str, model: AuxiliaryModel, **options: Any) -> None:
        super().__init__(name, model, **options)
        assert model.objective is not None
        assert model.optimizer is not None
        self._name = name
        self._objective: Objective = model.objective
        self._settings = settings = model.optimizer
        for name, parameter in self.parameters.items():
            in_file, *_ = by_names_in_files({name: parameter}, model_type=self.model_type)  # of fused experts, any
            parameter.requires_grad_(is_trained(in_file, freeze=settings.freeze, train_only=settings.train_only))
        self._trained = {name: p for name, p in self.parameters.items() if p.requires_grad}
        # AdamW updates these. In a float32 model they are the parameters; bfloat16 would round away small updates.
        self._weights: dict[str, torch.Tensor] = {
            name: p
            if p.dtype == torch.float32 and not self._is_exact_on_gpu
            else p.detach().to(torch.float32, copy=True)
            for name, p in self._trained.items()
        }
        decayed = [w for name, w in self._weights.items() if has_weight_decay(name, ndim=w.ndim)]
        spared = [w for name, w in self._weights.items() if not has_weight_decay(name, ndim=w.ndim)]
        self._optimizer = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": settings.weight_decay},
                {"params": spared, "weight_decay": 0.0},
            ],
            betas=settings.betas,
            eps=settings.eps,
            fused=self._device.type == "cuda",
        )

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from super().tensors()
        yield from self._weights.values()
        yield from (one.grad for one in (*self.parameters.values(), *self._weights.values()) if one.grad is not None)
        for state in self._optimizer.state.values():
            yield from (one for one in state.values() if isinstance(one, torch.Tensor))

    def step(self, share: Sequence[MicroBatch], *, learning_rate: float) -> StepResult:
        """Run a step. An error before the update changes only gradients."""
        for weight in self._weights.values():
            weight.grad = torch.zeros_like(weight)
        totals, recorded = self._objective.zero(self._device), RecordedTokens()
        for micro_batch in share:
            totals = totals + self._accumulate(micro_batch, recorded)
        if (scale := self._objective.gradient_scale(totals)) is not None:
            torch._foreach_mul_([weight.grad for weight in self._weights.values() if weight.grad is not None], scale)
        grad_norm = float(torch.nn.utils.clip_grad_norm_(self._weights.values(), self._settings.max_grad_norm))
        is_skipped = not is_trainable(float(totals.sums[0]), grad_norm)
        if not is_skipped:
            learning_rate *= self._objective.learning_rate_share(totals)
            try:
                self._update(learning_rate)
            except RuntimeError as error:  # AdamW's moments may not fit into memory; some weights may be new already
                raise BackendError(f"the optimizer's update failed: {error}") from error
        metrics = step_metrics(
            self._objective.metrics(totals),
            model=self._name,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            is_skipped=is_skipped,
        )
        return StepResult(metrics=metrics, tokens=recorded.on_host())

    def _accumulate(self, micro_batch: MicroBatch, recorded: RecordedTokens) -> diagnostics.Sums:
        """Add the gradients of a micro-batch to those of the weights."""
        rows = micro_batches.response_rows(micro_batch)
        if not len(rows):
            return self._objective.zero(self._device)
        row = self._row(micro_batch, rows)
        outputs = self._with_logits(row) if self._objective.needs_logits else self._outputs(row)
        recorded.add(micro_batch, outputs)
        inputs = row.loss_inputs(*outputs) if self._value_head is None else row.value_inputs(*outputs)
        loss, sums = self._objective.objective(inputs)
        gradients = torch.autograd.grad(loss, list(self._trained.values()), allow_unused=True)
        for weight, gradient in zip(self._weights.values(), gradients, strict=True):
            if gradient is not None and weight.grad is not None:
                weight.grad += gradient
        return sums

    def _update(self, learning_rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        self._round_weights()

    @torch.no_grad()
    def _round_weights(self) -> None:
        for name, parameter in self._trained.items():
            if parameter is not self._weights[name]:
                weight = self._weights[name]
                parameter.copy_(weight.to(self._run_dtype) if self._is_exact_on_gpu else weight)

    def forget_moments(self) -> None:
        """See ResetsOptimizer."""
        self._optimizer.state.clear()

    def save(self, folder: Path) -> None:
        """Write all weights, the optimizer's state and the random generators. Raises CheckpointError."""
        tensors = {"random|cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            tensors["random|cuda"] = torch.cuda.get_rng_state()
        for name, weight in self._all_weights().items():
            tensors[f"value|{name}"] = _plain(weight)
            moments = self._optimizer.state.get(weight, {})
            kinds = _MOMENTS if self._settings.is_saved else ("step",)
            tensors |= {f"{kind}|{name}": _plain(moments[kind]) for kind in kinds if kind in moments}
        _write_state(tensors, folder)

    @torch.no_grad()
    def restore(self, folder: Path) -> None:
        tensors = read_state(folder)

        def saved(kind: str, name: str, size: int) -> torch.Tensor:
            tensor = tensors.get(f"{kind}|{name}", torch.empty(0))
            if tensor.numel() != size:
                raise CheckpointError(
                    f"{folder}: {name} has {tensor.numel()} saved elements ({kind}), the model needs {size}; is this a "
                    "checkpoint of another model?"
                )
            return tensor

        for name, weight in self._all_weights().items():
            weight.copy_(saved("value", name, weight.numel()).view(weight.shape))
            if name in self._trained:
                kinds = _MOMENTS if f"exp_avg|{name}" in tensors else ()  # none before the first step
                moments = {kind: saved(kind, name, 1 if kind == "step" else weight.numel()) for kind in kinds}
                self._optimizer.state[weight] = reshape_moments(moments, weight)
        torch.set_rng_state(tensors["random|cpu"])
        if torch.cuda.is_available() and "random|cuda" in tensors:
            torch.cuda.set_rng_state(tensors["random|cuda"])
        self._round_weights()
        kept = {name.partition("|")[0] for name in tensors}
        if "step" in kept and "exp_avg" not in kept:
            log.warning(NO_MOMENTS, folder)

    def _all_weights(self) -> dict[str, torch.Tensor]:
        """Return all weights by name. Frozen ones are included, because a resumed run may freeze other parameters."""
        return self.parameters | self.buffers | self._weights


def _write_state(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / STATE_FILE)
        (folder / INDEX).write_text(json.dumps({"format": "reference"}))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: cannot write the state of the backend: {error}") from error


def read_state(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint. Raises CheckpointError if ``folder`` holds none of the reference backend."""
    try:
        written_as = json.loads((folder / INDEX).read_text())["format"]
        if written_as != "reference":
            raise ValueError(f"the format is {written_as!r}; resume with the backend that wrote it")
        tensors: dict[str, torch.Tensor] = load_file(folder / STATE_FILE)
        return tensors
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder}: not a checkpoint of the reference backend: {error}") from error


def _plain(value: torch.Tensor) -> torch.Tensor:
    """Return a flat copy on the CPU that shares no memory, as safetensors requires."""
    return value.detach().reshape(-1).to("cpu", copy=True)
