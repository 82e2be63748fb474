"""One process of the Megatron-Core learner: its share of a batch to gradients, its part of an optimizer step.

Every rank does the same: gradients are the *sum* over data-parallel ranks and micro-batches of loss x weight, because
the weights already carry the whole batch's denominators; metrics are reduced over the same ranks. From the first
micro-batch to the gradients' norm the host never waits for the device.
Tests: tests/test_backend_contract.py (equal to the reference), tests/test_megatron.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.distributed_c10d import Store
from torch.profiler import record_function

from asyncrl.backends import huggingface, megatron_cpu, megatron_model, micro_batches, optimizer_state
from asyncrl.backends.followers import Command, Job, Place
from asyncrl.backends.megatron_noise import quiet, quiet_logs
from asyncrl.backends.micro_batches import PackedRow
from asyncrl.backends.offload import HostMoments
from asyncrl.backends.optimizer_settings import is_trainable, step_metrics
from asyncrl.backends.packed_attention import uses_varlen
from asyncrl.errors import BackendError
from asyncrl.policies import diagnostics
from asyncrl.policies.packing import MicroBatch, empty
from asyncrl.protocols import StepResult
from asyncrl.snapshot import Snapshot


class MegatronRank:
    """One process of the learner: its copy of the model, its share of the batch, its part of the optimizer."""

    @quiet()
    def __init__(self, job: Job, place: Place, *, store: Store | None = None) -> None:
        quiet_logs()
        if job.threads:
            torch.set_num_threads(job.threads)
        self._job, self._place = job, place
        self._dtype: torch.dtype = getattr(torch, job.dtype)
        self._device = _device(job.device, place)
        megatron_cpu.use_device(self._device)
        try:
            _join(place, self._device, store)
            megatron_model.join(place, job.tensor_parallel)
            self._build()
        except BaseException:
            self.close()
            raise

    def _build(self) -> None:
        """The model with the folder's weights, Megatron's gradient buffers, its optimizer."""
        job = self._job
        self._data_parallel = megatron_model.data_parallel_group()
        self._tensor_parallel = megatron_model.tensor_parallel_group()
        self._shape = huggingface.read_shape(job.model_path)
        self._maps = huggingface.weight_map(self._shape)
        model = megatron_model.build_model(job, self._shape, self._dtype, self._device)
        self._parameters: dict[str, torch.nn.Parameter] = dict(model.named_parameters())
        self._load_weights()
        self._model = megatron_model.with_gradient_buffers(model, job)
        self._optimizer = megatron_model.build_optimizer(job, self._model, self._dtype, self._device)
        self._moments = HostMoments(self._optimizer.optimizer) if job.is_offloading else None

    @torch.no_grad()
    def _load_weights(self) -> None:
        """The Hugging Face folder's weights into the model; every parameter gets its own."""
        ranks, rank = self._tensor_parallel.size(), self._tensor_parallel.rank()
        if {entry.megatron for entry in self._maps} != set(self._parameters):
            names = {entry.megatron for entry in self._maps} ^ set(self._parameters)
            raise BackendError(f"the weight map does not cover {names}")
        with huggingface.open_weights(self._job.model_path) as read:
            for entry in self._maps:
                parts = [read(name) for name in entry.huggingface]
                shards = huggingface.fuse(parts, entry.cut, self._shape, tensor_parallel=ranks)
                parameter: Any = self._parameters[entry.megatron]
                parameter.copy_(shards[rank])
                # The norm of the gradients counts what every rank has once; older Megatron marks only what it draws.
                parameter.tensor_model_parallel = entry.cut != "whole"

    @quiet()
    def obey(self, command: Command) -> Any:
        """Do what every rank named does now; what comes of it here."""
        if command.name == "step":
            return self.step(command.micro_batches, learning_rate=command.learning_rate)
        if command.name == "logprobs":
            return self.logprobs(command.micro_batches[0])
        if command.name == "export":
            return self.export()
        return {"save": self.save, "restore": self.restore}[command.name](Path(command.folder))

    def step(self, share: Sequence[MicroBatch], *, learning_rate: float) -> StepResult:
        """One optimizer step; ranks meet in the sums of gradients and metrics, so all take it or all skip it."""
        self._model.zero_grad_buffer()
        self._optimizer.zero_grad()
        totals = diagnostics.zero(self._device)
        share = share or (empty(),)
        with self._model.no_sync():
            for micro_batch in share[:-1]:
                totals = totals + self._accumulate(micro_batch)
        totals = totals + self._accumulate(share[-1])  # gradients are summed over ranks as they come
        with record_function("learner: reduce"):
            megatron_model.reduce_gradients(self._model)
            _reduce(totals.sums, self._data_parallel)
            _reduce(totals.maxima, self._data_parallel, dist.ReduceOp.MAX)
            self._optimizer.prepare_grads()
            if (scale := self._job.algorithm.gradient_scale(totals)) is not None:
                torch._foreach_mul_([w.grad for w in self._optimizer.get_parameters() if w.grad is not None], scale)
            loss, grad_norm = torch.stack([totals.sums[0], self._grad_norm()]).tolist()
        is_skipped = not is_trainable(loss, grad_norm)
        if not is_skipped:
            learning_rate *= self._job.algorithm.learning_rate_share(totals)
            with record_function("learner: optimizer"):
                self._update(grad_norm, learning_rate)
        metrics = step_metrics(totals, grad_norm=grad_norm, learning_rate=learning_rate, is_skipped=is_skipped)
        if self._device.type == "cuda":
            metrics = {**metrics, "learner/memory_bytes": float(torch.cuda.max_memory_allocated())}
        return StepResult(metrics=metrics)

    def _accumulate(self, micro_batch: MicroBatch) -> diagnostics.Sums:
        """Add a micro-batch's gradients to Megatron's buffers."""
        row = self._row(micro_batch, micro_batches.response_rows(micro_batch))
        with record_function("learner: forward"):
            logprobs, entropy = self._model(row, self._job.temperature)
            loss, sums = self._job.algorithm.objective(row.loss_inputs(logprobs, entropy))
        with record_function("learner: backward"):
            loss.backward()  # type: ignore[no-untyped-call]
        return sums

    def _row(self, micro_batch: MicroBatch, rows: NDArray[np.int64]) -> PackedRow:
        in_rectangles = not uses_varlen(self._device, self._dtype)
        return PackedRow.of(micro_batch, rows, device=self._device, in_rectangles=in_rectangles)

    def _grad_norm(self) -> torch.Tensor:
        """Of all gradients of all ranks, f64 scalar; Megatron's own asks the device once per parameter."""
        is_first = self._tensor_parallel.rank() == 0  # counts what all tensor-parallel ranks have
        weights = [
            w for w in self._optimizer.get_parameters() if is_first or getattr(w, "tensor_model_parallel", False)
        ]
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        if gradients:
            total = torch.stack(torch._foreach_norm(gradients)).double().square().sum()
        _reduce(total, dist.group.WORLD if self._job.is_distributed_optimizer else self._tensor_parallel)
        return total.sqrt()

    def _update(self, grad_norm: float, learning_rate: float) -> None:
        settings = self._job.optimizer
        if grad_norm > settings.max_grad_norm:
            gradients = [weight.grad for weight in self._optimizer.get_parameters() if weight.grad is not None]
            torch._foreach_mul_(gradients, settings.max_grad_norm / (grad_norm + 1e-6))
        for group in self._optimizer.optimizer.param_groups:
            group["lr"] = learning_rate
            group["weight_decay"] = settings.weight_decay * group["wd_mult"]  # Megatron leaves this to its scheduler
        with self._moments.on_device() if self._moments else nullcontext():
            self._optimizer.step_with_ready_grads()

    @torch.no_grad()
    def logprobs(self, micro_batch: MicroBatch) -> NDArray[np.float32]:
        """See Backend."""
        result = np.zeros(micro_batch.num_tokens, np.float32)
        rows = micro_batches.predicted_rows(micro_batch)
        if len(rows):
            logprobs, _ = self._model(self._row(micro_batch, rows), self._job.temperature)
            result[rows] = logprobs.cpu().numpy()
        return result

    @torch.no_grad()
    def export(self) -> Snapshot | None:
        """See Backend; None on all but the first of the tensor-parallel ranks, which gives them its parts."""
        weights: list[tuple[str, torch.Tensor]] = []
        for entry in self._maps:
            shards = self._gathered(self._parameters[entry.megatron].detach(), entry.cut)
            if shards:
                tensors = huggingface.unfuse(shards, entry.cut, self._shape)
                weights += zip(entry.huggingface, tensors, strict=True)
        return Snapshot.of(weights, dtype=self._shape.dtype) if weights else None

    def _gathered(self, shard: torch.Tensor, cut: huggingface.Cut) -> list[torch.Tensor]:
        """All shards of a parameter on the first tensor-parallel rank, nothing on the others."""
        ranks, rank = self._tensor_parallel.size(), self._tensor_parallel.rank()
        if ranks == 1 or cut == "whole":
            return [shard] if rank == 0 else []
        shards = [torch.empty_like(shard) for _ in range(ranks)] if rank == 0 else []
        dist.gather(shard, shards or None, group=self._tensor_parallel, group_dst=0)
        return shards

    def save(self, folder: Path) -> None:
        """Write this rank's file; the index follows when every rank has written. Raises CheckpointError."""
        pieces = self._pieces() if self._job.is_distributed_optimizer or self._data_parallel.rank() == 0 else []
        optimizer_state.write_pieces(folder, pieces, self._optimizer.optimizer.state, rank=self._place.rank)
        dist.all_reduce(torch.zeros(1, device=self._device))
        if self._place.rank == 0:
            optimizer_state.write_index(folder, ranks=self._place.ranks, tensor_parallel=self._tensor_parallel.size())

    @torch.no_grad()
    def restore(self, folder: Path) -> None:
        """Read what any number of ranks wrote. Raises CheckpointError."""
        with optimizer_state.open_state(folder, tensor_parallel=self._tensor_parallel.size()) as saved:
            sizes = {}
            for name, parameter in self._shards():
                sizes[name] = parameter.numel()
                parameter.copy_(saved.value(name, parameter.numel()).view(parameter.shape))
            for piece in self._pieces():
                size = sizes[piece.name]
                own = slice(piece.start, piece.start + piece.value.numel())
                piece.value.copy_(saved.value(piece.name, size)[own].view(piece.value.shape))
                moments = saved.moments(piece.name, size, own)
                self._optimizer.optimizer.state[piece.value] = optimizer_state.shaped(moments, piece.value)
            saved.restore_random_states(self._place.rank)

    def _shards(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """This rank's parameters by the names they have in a checkpoint."""
        suffix = f"@{self._tensor_parallel.rank()}" if self._tensor_parallel.size() > 1 else ""
        return ((name + suffix, parameter) for name, parameter in self._parameters.items())

    def _pieces(self) -> Iterator[optimizer_state.Piece]:
        """What this rank's optimizer updates. Megatron keeps the float32 copy of a 16-bit parameter as main_param."""
        for name, parameter in self._shards():
            if not self._job.is_distributed_optimizer:
                value: Any = parameter if self._dtype == torch.float32 else parameter.main_param  # type: ignore[attr-defined]
                yield optimizer_state.Piece(name=name, start=0, value=value)
            elif parameter in self._optimizer.model_param_group_index_map:
                group, index = self._optimizer.model_param_group_index_map[parameter]
                value = self._optimizer.optimizer.param_groups[group]["params"][index]
                start = self._optimizer._get_model_param_range_map(parameter)["param"].start
                yield optimizer_state.Piece(name=name, start=start, value=value)

    def close(self) -> None:
        """Leave the process groups; Megatron's are global, and another rank may be made after this."""
        megatron_model.leave()
        if dist.is_initialized():
            dist.destroy_process_group()


def _device(kind: str, place: Place) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", place.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _join(place: Place, device: torch.device, store: Store | None) -> None:
    """Meet the other ranks."""
    timeout = timedelta(seconds=place.timeout_seconds)
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "nccl",
        store=store or dist.TCPStore(place.host, place.port, None, False, timeout),  # type: ignore[attr-defined]
        rank=place.rank,
        world_size=place.ranks,
        timeout=timeout,
    )


def _reduce(values: torch.Tensor, group: dist.ProcessGroup | None, operation: Any = dist.ReduceOp.SUM) -> None:
    if group is not None and group.size() > 1:
        dist.all_reduce(values, op=operation, group=group)
