"""The backend that is easy to believe: one process, plain PyTorch, a Hugging Face model. Others are tested against it.

A step: logprobs of the response tokens, ``algorithm.objective`` per micro-batch, gradients summed over micro-batches in
float32, clipped by their global norm, AdamW on float32 weights, and those rounded to the model's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.backends import micro_batches, optimizer_state
from asyncrl.backends.micro_batches import PackedRow
from asyncrl.backends.optimizer_settings import OptimizerSettings, is_trainable, step_metrics
from asyncrl.errors import BackendError, ConfigError
from asyncrl.policies import diagnostics
from asyncrl.policies.algorithms import Algorithm
from asyncrl.policies.packing import MicroBatch
from asyncrl.protocols import StepResult
from asyncrl.snapshot import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """[learner.options] of the reference backend: none."""


class ReferenceBackend:
    """Trains any causal language model that transformers loads."""

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
    ) -> None:
        self._path = model_path
        self._algorithm = algorithm
        self._settings = optimizer
        self._temperature = temperature
        self._device = torch.device(device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu")
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._threads = threads
        self._model: Any = None

    def start(self) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        if self._threads:
            torch.set_num_threads(self._threads)
        try:
            self._export_dtype = AutoConfig.from_pretrained(self._path).dtype or torch.float32
            self._model = AutoModelForCausalLM.from_pretrained(self._path, dtype=self._dtype).to(self._device)
        except (OSError, ValueError) as error:
            raise ConfigError(f"model.path: transformers cannot load {self._path}: {error}") from None
        self._model.get_input_embeddings().padding_idx = None  # transformers does not train the pad token's embedding
        self._model.eval()  # no dropout: trainer logprobs must be the policy's
        self._parameters: dict[str, torch.Tensor] = dict(self._model.named_parameters())
        # What AdamW updates. In float32 these are the parameters; bfloat16 would round small steps away.
        self._weights = {
            name: p if p.dtype == torch.float32 else p.detach().float() for name, p in self._parameters.items()
        }
        decayed = [w for w in self._weights.values() if w.ndim > 1]
        spared = [w for w in self._weights.values() if w.ndim <= 1]
        self._optimizer = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": self._settings.weight_decay},
                {"params": spared, "weight_decay": 0.0},
            ],
            betas=self._settings.betas,
            eps=self._settings.eps,
            fused=self._device.type == "cuda",
        )

    def step(self, shares: Sequence[Sequence[MicroBatch]], *, learning_rate: float) -> StepResult:
        if len(shares) != 1:
            raise BackendError(f"the reference backend is one rank and got {len(shares)} shares; set learner.ranks = 1")
        for weight in self._weights.values():
            weight.grad = torch.zeros_like(weight)
        totals = diagnostics.zero(self._device)
        for micro_batch in shares[0]:
            totals = totals + self._accumulate(micro_batch)
        if (scale := self._algorithm.gradient_scale(totals)) is not None:
            torch._foreach_mul_([weight.grad for weight in self._weights.values() if weight.grad is not None], scale)
        grad_norm = float(torch.nn.utils.clip_grad_norm_(self._weights.values(), self._settings.max_grad_norm))
        is_skipped = not is_trainable(float(totals.sums[0]), grad_norm)
        if not is_skipped:
            learning_rate *= self._algorithm.learning_rate_share(totals)
            self._update(learning_rate)
        return StepResult(
            metrics=step_metrics(totals, grad_norm=grad_norm, learning_rate=learning_rate, is_skipped=is_skipped)
        )

    def _accumulate(self, micro_batch: MicroBatch) -> diagnostics.Sums:
        """Add a micro-batch's gradients to the weights'."""
        rows = micro_batches.response_rows(micro_batch)
        if not len(rows):
            return diagnostics.zero(self._device)
        row = self._row(micro_batch, rows)
        loss, sums = self._algorithm.objective(row.loss_inputs(*self._token_logprobs(row)))
        gradients = torch.autograd.grad(loss, list(self._parameters.values()), allow_unused=True)
        for weight, gradient in zip(self._weights.values(), gradients, strict=True):
            if gradient is not None and weight.grad is not None:
                weight.grad += gradient
        return sums

    def _row(self, micro_batch: MicroBatch, rows: NDArray[np.int64]) -> PackedRow:
        return PackedRow.of(micro_batch, rows, device=self._device, in_rectangles=True)

    def _token_logprobs(self, row: PackedRow) -> tuple[torch.Tensor, torch.Tensor]:
        """Logprob and entropy of the tokens at ``row.rows``, f32[M] each, from the hidden state before each."""
        assert row.layout is not None
        hidden = torch.cat(
            [
                self._model.base_model(input_ids=row.tokens[indices], use_cache=False).last_hidden_state.flatten(0, 1)
                for indices in row.layout.indices
            ]
        )
        before = hidden[row.layout.order[row.rows - 1]]
        logits = self._model.get_output_embeddings()(before).float() / self._temperature
        distribution = torch.log_softmax(logits, dim=-1)
        logprobs = distribution.gather(-1, row.tokens[row.rows][:, None])[:, 0]
        entropy = -(distribution.exp() * distribution).sum(-1)
        return logprobs, entropy

    def _update(self, learning_rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        self._round_weights()

    @torch.no_grad()
    def _round_weights(self) -> None:
        for name, parameter in self._parameters.items():
            if parameter is not self._weights[name]:
                parameter.copy_(self._weights[name])

    @torch.no_grad()
    def logprobs(self, micro_batch: MicroBatch) -> NDArray[np.float32]:
        result = np.zeros(micro_batch.num_tokens, np.float32)
        rows = micro_batches.predicted_rows(micro_batch)
        if len(rows):
            result[rows] = self._token_logprobs(self._row(micro_batch, rows))[0].cpu().numpy()
        return result

    def export(self) -> Snapshot:
        return Snapshot.of(self._parameters.items(), dtype=self._export_dtype)

    def save(self, folder: Path) -> None:
        optimizer_state.write_pieces(folder, self._pieces(), self._optimizer.state, rank=0)
        optimizer_state.write_index(folder, ranks=1)

    @torch.no_grad()
    def restore(self, folder: Path) -> None:
        with optimizer_state.open_state(folder) as saved:
            for piece in self._pieces():
                shape, size = piece.value.shape, piece.value.numel()
                piece.value.copy_(saved.value(piece.name, size).view(shape))
                moments = saved.moments(piece.name, size, slice(0, size))
                self._optimizer.state[piece.value] = optimizer_state.shaped(moments, piece.value)
            saved.restore_random_states(0)
        self._round_weights()

    def _pieces(self) -> list[optimizer_state.Piece]:
        return [optimizer_state.Piece(name=name, start=0, value=weight) for name, weight in self._weights.items()]

    def close(self) -> None:
        """Nothing to end."""
