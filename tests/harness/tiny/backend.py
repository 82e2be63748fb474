"""The tiny policy as a Backend: the algorithm's objective, one Adam step, and the exact expected reward.

learner.backend = "tests.harness.tiny.backend:TinyBackend"
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray

from asyncrl.backends import micro_batches
from asyncrl.backends.adapter import BackendAdapter
from asyncrl.backends.micro_batches import PackedRow
from asyncrl.backends.models import POLICY
from asyncrl.backends.optimizer_settings import OptimizerSettings, step_metrics
from asyncrl.backends.port import StepResult
from asyncrl.policies.algorithms.algorithm import Algorithm
from asyncrl.policies.batching.packing import MicroBatch
from asyncrl.policies.corrections import diagnostics
from asyncrl.tensors.snapshot import Snapshot
from tests.harness.tiny.adam import Adam
from tests.harness.tiny.files import FIRST_DIGIT, WEIGHTS_FILE
from tests.harness.tiny.task import LENGTH, Policy, expected_reward

EXPECTED_REWARD: Final = "reward/expected"
"""Metric: J after the step."""
_CPU: Final = torch.device("cpu")
_STATE_FILE: Final = "optimizer.pt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    behavior: Literal["sampled", "recomputed"] = "sampled"
    """recomputed: use the trainer's own logprobs as behavior logprobs, as if the engine's had not been kept."""
    step_seconds: float = 0.0
    """Minimum duration of a step."""


class TinyBackend(BackendAdapter):
    """One process, float32."""

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
    ) -> None:
        assert temperature == 1.0, "the engine samples at 1"
        self._path, self._algorithm, self._settings, self._options = model_path, algorithm, optimizer, options
        self._policy: Policy

    def start(self) -> None:
        self._policy = Policy.of(safetensors.torch.load_file(self._path / WEIGHTS_FILE), is_trained=True)
        self._optimizer = Adam(
            self._policy.parameters,
            betas=self._settings.betas,
            eps=self._settings.eps,
            weight_decay=self._settings.weight_decay,
        )

    def step(
        self, dp_shards: Sequence[Sequence[MicroBatch]], *, learning_rate: float, model: str = POLICY
    ) -> StepResult:
        started = time.monotonic()
        totals, norm = self._gradients(dp_shards)
        learning_rate *= self._algorithm.learning_rate_share(totals)
        self._optimizer.step(learning_rate)
        metrics = step_metrics(
            self._algorithm.metrics(totals), model=model, grad_norm=norm, learning_rate=learning_rate, is_skipped=False
        )
        reward = expected_reward(self._policy)
        time.sleep(max(0.0, started + self._options.step_seconds - time.monotonic()))
        return StepResult(metrics={**metrics, EXPECTED_REWARD: reward})

    def _gradients(self, dp_shards: Sequence[Sequence[MicroBatch]]) -> tuple[diagnostics.Sums, float]:
        """Compute the clipped gradients of the whole batch. Return its sums, and the norm before clipping."""
        (share,) = dp_shards
        self._optimizer.clear_gradients()
        totals = self._algorithm.zero(_CPU)
        for micro_batch in share:
            totals = totals + self._accumulate(micro_batch)
        scale = self._algorithm.gradient_scale(totals)
        if scale is not None:
            for parameter in self._policy.parameters:
                assert parameter.grad is not None
                parameter.grad *= scale
        return totals, float(torch.nn.utils.clip_grad_norm_(self._policy.parameters, self._settings.max_grad_norm))

    def _accumulate(self, micro_batch: MicroBatch) -> diagnostics.Sums:
        row = PackedRow.from_micro_batch(
            micro_batch, micro_batches.response_rows(micro_batch), device=_CPU, in_rectangles=False
        )
        each, logprobs = self._predict(micro_batch)
        inputs = row.loss_inputs(logprobs, -(each.detach().exp() * each.detach()).sum(1))
        if self._options.behavior == "recomputed":
            inputs = dataclasses.replace(inputs, behavior_logprobs=logprobs.detach())
        loss, sums = self._algorithm.objective(inputs)
        loss.backward()  # type: ignore[no-untyped-call]
        return sums

    def _predict(self, micro_batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the distribution at each response token, and the token's logprob.  f32[M, SIZE], f32[M]"""
        sequences = torch.from_numpy(micro_batch.tokens.astype(np.int64) - FIRST_DIGIT).view(-1, 2 + LENGTH)
        prompts, answers = sequences[:, :2], sequences[:, 2:]
        each = self._policy.distributions(prompts, answers)
        return each, each.gather(1, answers.reshape(-1, 1))[:, 0]

    @torch.no_grad()
    def forward(
        self, dp_shards: Sequence[Sequence[MicroBatch]], *, model: str = POLICY
    ) -> list[list[NDArray[np.float32]]]:
        """Return logprobs of the response tokens; 0 at prompt tokens, which the net does not predict."""
        return [[self._score(micro_batch) for micro_batch in share] for share in dp_shards]

    def _score(self, micro_batch: MicroBatch) -> NDArray[np.float32]:
        result = np.zeros(micro_batch.num_tokens, np.float32)
        result[micro_batches.response_rows(micro_batch)] = self._predict(micro_batch)[1].numpy()
        return result

    def export(self) -> Snapshot:
        return Snapshot.from_tensors(self._policy.named_parameters.items())

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        safetensors.torch.save_file(self._policy.copy().named_parameters, folder / WEIGHTS_FILE)
        torch.save(self._optimizer.state(), folder / _STATE_FILE)

    def restore(self, folder: Path) -> None:
        self._path = folder
        self.start()
        self._optimizer.load(torch.load(folder / _STATE_FILE, weights_only=True))

    def close(self) -> None:
        pass
