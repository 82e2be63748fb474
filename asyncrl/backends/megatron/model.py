"""Megatron-Core's GPTModel on packed rows: assembled of layers.py, never materialises all logits."""

from __future__ import annotations

import torch

from asyncrl.backends.families.shape import ModelShape
from asyncrl.backends.kernels import fused
from asyncrl.backends.kernels.token_logprobs import linear_logprobs
from asyncrl.backends.megatron import cpu_shim
from asyncrl.backends.megatron.layer_specs import layers
from asyncrl.backends.megatron.layers import RowParameters
from asyncrl.backends.megatron.log_filter import quiet
from asyncrl.backends.megatron.process_groups import tensor_parallel_group
from asyncrl.backends.megatron.rank_commands import Job
from asyncrl.backends.megatron.transformer_config import transformer_config
from asyncrl.backends.micro_batches import PackedRow
from asyncrl.backends.models import Head
from asyncrl.backends.weight_cuts import padded_vocabulary

with quiet(), cpu_shim.without_compilation():
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import TransformerConfig


class PackedGPT(GPTModel):  # type: ignore[misc]
    """Megatron's GPTModel on one row of documents: positions restart in each; never materialises all logits."""

    def __init__(self, config: TransformerConfig, shape: ModelShape, device: torch.device, *, head: Head) -> None:
        super().__init__(
            config=config,
            transformer_layer_spec=layers(config, shape),
            vocab_size=padded_vocabulary(shape, config.tensor_model_parallel_size),
            max_sequence_length=0,  # only used by learned positions
            position_embedding_type="none",  # rotary angles are computed below
            # With a value head there is no output layer; a shared one has no weight of its own.
            share_embeddings_and_output_weights=shape.is_tied or head == "values",
        )
        self._frequencies = shape.rope_frequencies.to(device)
        self._vocabulary_size = shape.vocabulary_size
        if head == "values":
            self.value_head = torch.nn.Linear(shape.hidden_size, 1, bias=False)
            torch.nn.init.zeros_(self.value_head.weight)

    def logprobs(self, row: PackedRow, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Logprob and entropy of the tokens at ``row.rows``, f32[M] each, from the hidden state before each."""
        is_tied = self.share_embeddings_and_output_weights
        return linear_logprobs(
            self._hidden(row).index_select(0, row.rows - 1),
            self.shared_embedding_or_output_weight() if is_tied else self.output_layer.weight,
            row.tokens.index_select(0, row.rows),
            temperature=temperature,
            vocabulary_size=self._vocabulary_size,
            group=tensor_parallel_group(),
        )

    def values(self, row: PackedRow) -> torch.Tensor:
        """The value after each token, f32[N].

        Every tensor-parallel rank has the whole head and the same hidden states, hence the full gradient of both: do
        not sum it over these ranks.
        """
        return self._hidden(row).float() @ self.value_head.weight[0].float()

    def _hidden(self, row: PackedRow) -> torch.Tensor:
        """The last hidden state of every token, [N, H]."""
        hidden = self.embedding(input_ids=row.tokens[None], position_ids=row.positions[None])
        if torch.is_grad_enabled() and not hidden.requires_grad:
            hidden.requires_grad_()  # frozen embeddings: recomputed layers get no gradients without one at their input
        rotary = fused.rotary(row.positions, self._frequencies)
        hidden = self.decoder(
            hidden_states=hidden,
            attention_mask=None,
            packed_seq_params=RowParameters(qkv_format="sbhd", row=row, rotary=rotary),
        )
        return hidden.flatten(0, 1)  # type: ignore[no-any-return]


def build_model(job: Job, shape: ModelShape, device: torch.device, *, head: Head) -> PackedGPT:
    """The model without its weights."""
    model = PackedGPT(transformer_config(job, shape, job.torch_dtype), shape, device, head=head)
    model.to(device, job.torch_dtype)
    return model
