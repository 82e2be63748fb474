"""One process of the Megatron-Core learner: GPTModel on packed rows, Megatron's gradient buffers and optimizer.

The only file that imports megatron. Every rank does the same: gradients are the *sum* over ranks and micro-batches of
loss x weight, because the weights already carry the whole batch's denominators; metrics are reduced over all ranks.
Tests: tests/test_backend_contract.py (equal to the reference), tests/test_megatron.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.distributed_c10d import Store

from asyncrl.backends import huggingface, megatron_cpu, micro_batches, optimizer_state
from asyncrl.backends.followers import Command, Job, Place
from asyncrl.backends.megatron_noise import quiet, quiet_logs
from asyncrl.backends.optimizer_settings import is_trainable, step_metrics
from asyncrl.backends.packed_attention import PackedAttention, PackedDocuments
from asyncrl.backends.token_logprobs import token_logprobs
from asyncrl.errors import BackendError
from asyncrl.policies import diagnostics
from asyncrl.policies.packing import MicroBatch
from asyncrl.protocols import StepResult

with quiet(), megatron_cpu.without_compilation():
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer import TransformerConfig


@dataclass
class _PackedRow(PackedSeqParams):  # type: ignore[misc]
    """What PackedAttention reads; sbhd makes Megatron treat the row as one dense sequence everywhere else."""

    documents: PackedDocuments | None = None


class PackedGPT(GPTModel):  # type: ignore[misc]
    """Megatron's GPTModel for one row of documents: positions start anew in each, logits only where they are read."""

    def __init__(self, config: TransformerConfig, shape: huggingface.ModelShape, device: torch.device) -> None:
        spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=shape.has_qk_norm)
        spec.submodules.self_attention.submodules.core_attention = PackedAttention
        super().__init__(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=huggingface.padded_vocabulary(shape, config.tensor_model_parallel_size),
            max_sequence_length=0,  # read by learned positions only
            position_embedding_type="none",  # rotary angles are made below
            share_embeddings_and_output_weights=shape.is_tied,
        )
        self._frequencies = shape.rope_frequencies.to(device)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, documents: PackedDocuments, rows: torch.Tensor
    ) -> torch.Tensor:
        """tokens, positions i64[N] -> logits [M, V / tensor-parallel ranks] of the hidden states at ``rows`` i64[M]."""
        hidden = self.embedding(input_ids=tokens[None], position_ids=positions[None])
        angles = positions[:, None].float() * self._frequencies
        hidden = self.decoder(
            hidden_states=hidden,
            attention_mask=None,
            rotary_pos_emb=torch.cat((angles, angles), dim=-1)[:, None, None, :],
            packed_seq_params=_PackedRow(qkv_format="sbhd", documents=documents),
        )
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits: torch.Tensor = self.output_layer(hidden[rows], weight=weight)[0]
        return logits[:, 0]


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
            self._build()
        except BaseException:
            self.close()
            raise

    def _build(self) -> None:
        """The model with the folder's weights, Megatron's gradient buffers, its optimizer."""
        job = self._job
        self._shape = huggingface.read_shape(job.model_path)
        model = PackedGPT(_transformer_config(job, self._shape, self._dtype), self._shape, self._device)
        model.to(self._device, self._dtype)
        self._parameters: dict[str, torch.nn.Parameter] = dict(model.named_parameters())
        self._load_weights()
        config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=job.is_distributed_optimizer
        )
        self._model = DistributedDataParallel(model.config, config, model)
        self._optimizer = _optimizer(job, self._model, self._dtype, self._device)

    @torch.no_grad()
    def _load_weights(self) -> None:
        """The Hugging Face folder's weights into the model; every parameter gets its own."""
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        rank = parallel_state.get_tensor_model_parallel_rank()
        maps = huggingface.weight_map(self._shape)
        if {entry.megatron for entry in maps} != set(self._parameters):
            raise BackendError(f"the weight map does not cover {set(self._parameters) ^ {m.megatron for m in maps}}")
        with huggingface.open_weights(self._job.model_path) as read:
            for entry in maps:
                parts = [read(name) for name in entry.huggingface]
                shards = huggingface.fuse(parts, entry.cut, self._shape, tensor_parallel=ranks)
                self._parameters[entry.megatron].copy_(shards[rank])

    @quiet()
    def obey(self, command: Command) -> StepResult:
        """Do what every rank does now. Only a step has metrics."""
        if command.name == "step":
            return self.step(command.micro_batches, learning_rate=command.learning_rate)
        {"save": self.save, "restore": self.restore}[command.name](Path(command.folder))
        return StepResult(metrics={})

    def step(self, share: Sequence[MicroBatch], *, learning_rate: float) -> StepResult:
        """One optimizer step; ranks meet in the sums of gradients and metrics, so all take it or all skip it."""
        self._model.zero_grad_buffer()
        self._optimizer.zero_grad()
        totals = diagnostics.zero(self._device)
        for micro_batch in share:
            totals = totals + self._accumulate(micro_batch)
        finalize_model_grads([self._model])
        dist.all_reduce(totals.sums)
        dist.all_reduce(totals.maxima, op=dist.ReduceOp.MAX)
        self._optimizer.prepare_grads()
        grad_norm = float(self._optimizer.get_grad_norm())
        is_skipped = not is_trainable(float(totals.sums[0]), grad_norm)
        if not is_skipped:
            self._update(grad_norm, learning_rate)
        metrics = step_metrics(totals, grad_norm=grad_norm, learning_rate=learning_rate, is_skipped=is_skipped)
        return StepResult(metrics=metrics)

    def _accumulate(self, micro_batch: MicroBatch) -> diagnostics.Sums:
        """Add a micro-batch's gradients to Megatron's buffers."""
        rows = micro_batches.response_rows(micro_batch)
        if not len(rows):
            return diagnostics.zero(self._device)
        logprobs, entropy = self._token_logprobs(micro_batch, rows)
        inputs = micro_batches.loss_inputs(micro_batch, rows, logprobs=logprobs, entropy=entropy)
        loss, sums = self._job.algorithm.objective(inputs)
        loss.backward()  # type: ignore[no-untyped-call]
        return sums

    def _token_logprobs(self, micro_batch: MicroBatch, rows: NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
        """Logprob and entropy of the tokens at ``rows``, f32[M] each, from the hidden states one position before."""
        tokens = micro_batches.tensor(micro_batch.tokens.astype(np.int64), self._device)
        wanted = micro_batches.tensor(rows, self._device)
        logits = self._model(
            tokens,
            micro_batches.tensor(micro_batch.positions.astype(np.int64), self._device),
            PackedDocuments.of(micro_batch, device=self._device, dtype=self._dtype),
            wanted - 1,
        )
        return token_logprobs(
            logits,
            tokens[wanted],
            temperature=self._job.temperature,
            vocabulary_size=self._shape.vocabulary_size,
            group=parallel_state.get_tensor_model_parallel_group(),
        )

    def _update(self, grad_norm: float, learning_rate: float) -> None:
        settings = self._job.optimizer
        if grad_norm > settings.max_grad_norm:
            gradients = [weight.grad for weight in self._optimizer.get_parameters() if weight.grad is not None]
            torch._foreach_mul_(gradients, settings.max_grad_norm / (grad_norm + 1e-6))
        for group in self._optimizer.optimizer.param_groups:
            group["lr"] = learning_rate
            group["weight_decay"] = settings.weight_decay * group["wd_mult"]  # Megatron leaves this to its scheduler
        self._optimizer.step_with_ready_grads()

    @torch.no_grad()
    def logprobs(self, micro_batch: MicroBatch) -> NDArray[np.float32]:
        """See Backend."""
        result = np.zeros(micro_batch.num_tokens, np.float32)
        rows = micro_batches.predicted_rows(micro_batch)
        if len(rows):
            result[rows] = self._token_logprobs(micro_batch, rows)[0].cpu().numpy()
        return result

    @torch.no_grad()
    def export(self) -> list[tuple[str, torch.Tensor]]:
        """See Backend. One tensor-parallel rank, so a parameter is its own only shard."""
        weights = []
        for entry in huggingface.weight_map(self._shape):
            tensors = huggingface.unfuse([self._parameters[entry.megatron].detach()], entry.cut, self._shape)
            for name, tensor in zip(entry.huggingface, tensors, strict=True):
                weights.append((name, tensor.to("cpu", self._shape.dtype, copy=True).contiguous()))
        return weights

    def save(self, folder: Path) -> None:
        """Write this rank's file; the index follows when every rank has written. Raises CheckpointError."""
        pieces = self._pieces() if self._job.is_distributed_optimizer or self._place.rank == 0 else []
        optimizer_state.write_pieces(folder, pieces, self._optimizer.optimizer.state, rank=self._place.rank)
        dist.all_reduce(torch.zeros(1, device=self._device))
        if self._place.rank == 0:
            optimizer_state.write_index(folder, ranks=self._place.ranks)

    @torch.no_grad()
    def restore(self, folder: Path) -> None:
        """Read what any number of ranks wrote. Raises CheckpointError."""
        with optimizer_state.open_state(folder) as saved:
            for name, parameter in self._parameters.items():
                parameter.copy_(saved.value(name, parameter.numel()).view(parameter.shape))
            for piece in self._pieces():
                size = self._parameters[piece.name].numel()
                own = slice(piece.start, piece.start + piece.value.numel())
                piece.value.copy_(saved.value(piece.name, size)[own].view(piece.value.shape))
                moments = saved.moments(piece.name, size, own)
                self._optimizer.optimizer.state[piece.value] = optimizer_state.shaped(moments, piece.value)
            saved.restore_random_states(self._place.rank)

    def _pieces(self) -> Iterator[optimizer_state.Piece]:
        """What this rank's optimizer updates. Megatron keeps the float32 copy of a 16-bit parameter as main_param."""
        for name, parameter in self._parameters.items():
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
        parallel_state.destroy_model_parallel()
        if dist.is_initialized():
            dist.destroy_process_group()


def _device(kind: str, place: Place) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", place.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _join(place: Place, device: torch.device, store: Store | None) -> None:
    """Meet the other ranks and split them up as Megatron wants them: data-parallel only, so far."""
    timeout = timedelta(seconds=place.timeout_seconds)
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "nccl",
        store=store or dist.TCPStore(place.host, place.port, None, False, timeout),  # type: ignore[attr-defined]
        rank=place.rank,
        world_size=place.ranks,
        timeout=timeout,
    )
    parallel_state.initialize_model_parallel(
        distributed_timeout_minutes=place.timeout_seconds / 60, create_gloo_process_groups=False
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)  # nothing draws from it; recomputation wants it to be there


def _transformer_config(job: Job, shape: huggingface.ModelShape, dtype: torch.dtype) -> TransformerConfig:
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.feed_forward_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_key_value_heads,
        kv_channels=shape.head_size,
        layernorm_epsilon=shape.norm_eps,
        normalization="RMSNorm",
        qk_layernorm=shape.has_qk_norm,
        add_qkv_bias=shape.has_qkv_bias,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        calculate_per_token_loss=True,  # gradients are summed over ranks, not averaged
        perform_initialization=False,  # the folder's weights come next
        # Kernels of Transformer Engine and Apex, which are not here:
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        bias_activation_fusion=False,
        **(recompute if job.is_recomputing else {}),
    )


def _optimizer(job: Job, model: DistributedDataParallel, dtype: torch.dtype, device: torch.device) -> Any:
    """Megatron's optimizer around torch's AdamW; the learning rate is set at every step."""
    settings = job.optimizer
    config = OptimizerConfig(
        optimizer="adam",
        lr=0.0,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.betas[0],
        adam_beta2=settings.betas[1],
        adam_eps=settings.eps,
        clip_grad=settings.max_grad_norm,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=job.is_distributed_optimizer,
    )
    with megatron_cpu.cuda_type_names(device):
        chained = get_megatron_optimizer(config, [model], use_gloo_process_groups=False)
    return chained.chained_optimizers[0]  # a second one would hold experts
