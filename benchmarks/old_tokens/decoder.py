"""A Llama that samples whole batches from weights that change between them. On a GPU a token is one CUDA graph.

A batch of short answers is limited by the host, which launches a thousand small kernels for each token; a graph is one
launch. Keys and values stand in buffers of fixed size: row b has its tokens from place 0 on, and what is behind its
last token is masked until it is overwritten.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

_PLACES: Final = 64
"""Buffers have a multiple of so many places."""


class Decoder:
    """The weights, and buffers for each number of rows."""

    def __init__(self, folder: Path, *, device: torch.device, dtype: torch.dtype, graphs: bool) -> None:
        from transformers import AutoConfig

        config: Any = AutoConfig.from_pretrained(folder)
        assert config.model_type == "llama", f"{folder}: a {config.model_type}, and the decoder reads a llama"
        self._device, self._dtype = device, dtype
        self._has_graphs = graphs and device.type == "cuda"
        self._eps: float = config.rms_norm_eps
        self._queries, self._keys = config.num_attention_heads, config.num_key_value_heads
        self._size: int = config.head_dim
        hidden, inner = config.hidden_size, config.intermediate_size
        heads = self._queries + 2 * self._keys
        self._embedding = self._empty(config.vocab_size, hidden)
        self._output = self._embedding if config.tie_word_embeddings else self._empty(config.vocab_size, hidden)
        self._norm = self._empty(hidden)
        self._layers = [
            _Layer(
                before=self._empty(hidden),
                qkv=self._empty(heads * self._size, hidden),
                out=self._empty(hidden, self._queries * self._size),
                between=self._empty(hidden),
                gate_up=self._empty(2 * inner, hidden),
                down=self._empty(hidden, inner),
            )
            for _ in range(config.num_hidden_layers)
        ]
        self._places = self._named(inner)
        self._frequencies: torch.Tensor = config.rope_parameters["rope_theta"] ** (
            -torch.arange(0, self._size, 2, device=device).float() / self._size
        )
        self._batches: dict[int, _Batch] = {}

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, device=self._device, dtype=self._dtype)

    def _named(self, inner: int) -> dict[str, torch.Tensor]:
        """Return where each tensor of a Hugging Face folder belongs."""
        places = {"model.embed_tokens.weight": self._embedding, "model.norm.weight": self._norm}
        places["lm_head.weight"] = self._output
        sizes = [count * self._size for count in (self._queries, self._keys, self._keys)]
        for number, layer in enumerate(self._layers):
            named = dict(zip("qkv", torch.split(layer.qkv, sizes), strict=True))
            attention = {f"self_attn.{name}_proj": one for name, one in (named | {"o": layer.out}).items()}
            gate, up = torch.split(layer.gate_up, inner)
            mlp = {"mlp.gate_proj": gate, "mlp.up_proj": up, "mlp.down_proj": layer.down}
            norms = {"input_layernorm": layer.before, "post_attention_layernorm": layer.between}
            for name, place in (attention | mlp | norms).items():
                places[f"model.layers.{number}.{name}.weight"] = place
        return places

    @torch.no_grad()
    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self._places[name].copy_(tensor)

    @torch.no_grad()
    def start(self, contexts: Sequence[Sequence[int]], *, most: int) -> _Batch:
        """Read the contexts; equal ones once. ``most``: tokens that follow each. The batch is valid until the next."""
        places = -(-(max(map(len, contexts)) + most) // _PLACES) * _PLACES
        batch = self._batches.get(len(contexts))
        if batch is None or batch.places < places:
            batch = self._batches[len(contexts)] = _Batch(self, len(contexts), places)
        numbers: dict[tuple[int, ...], int] = {}
        of_row = [numbers.setdefault(tuple(one), len(numbers)) for one in contexts]
        lengths = torch.tensor([len(one) for one in numbers], device=self._device)
        longest = max(map(len, numbers))
        padded = [[*one, *[0] * (longest - len(one))] for one in numbers]
        rows = torch.tensor(of_row, device=self._device)
        hidden = self._read(torch.tensor(padded, device=self._device), into=batch, rows=rows)
        last = hidden[torch.arange(len(numbers), device=self._device), lengths - 1]
        batch.positions.copy_(lengths[rows] - 1)
        batch.logits = (last @ self._output.T)[rows]
        return batch

    def _read(self, tokens: torch.Tensor, *, into: _Batch, rows: torch.Tensor) -> torch.Tensor:
        """Return the last hidden states of contexts, [U, L] -> [U, L, H]; row b has the keys of context rows[b]."""
        length = tokens.shape[1]
        turn = self._rotation(torch.arange(length, device=self._device))
        x = self._embedding[tokens]
        for layer, (keys, values) in zip(self._layers, into.cache, strict=True):
            query, key, value = (one.transpose(1, 2) for one in self._qkv(layer, x, turn))
            keys[:, :, :length], values[:, :, :length] = key[rows], value[rows]
            seen = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
            x = self._after(layer, x, seen.transpose(1, 2))
        return rms_norm(x, self._norm.shape, self._norm, self._eps)

    def next_logits(self, batch: _Batch) -> torch.Tensor:
        """Return the logits after the batch's newest tokens, which stand at its positions.  f[B, V]"""
        turn = self._rotation(batch.positions)
        sees = (batch.columns <= batch.positions[:, None])[:, None, None]
        x = self._embedding[batch.tokens]
        for layer, (keys, values) in zip(self._layers, batch.cache, strict=True):
            query, key, value = self._qkv(layer, x, turn)
            keys[batch.rows, :, batch.positions], values[batch.rows, :, batch.positions] = key, value
            shared = torch.unflatten(query, 1, (self._keys, -1))  # the queries of a key are rows of its attention
            seen = scaled_dot_product_attention(shared, keys, values, attn_mask=sees)
            x = self._after(layer, x, seen.flatten(1, 2))
        return rms_norm(x, self._norm.shape, self._norm, self._eps) @ self._output.T

    def _qkv(self, layer: _Layer, x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return queries, keys and values [..., heads, size] of [..., H], the first two turned by their positions."""
        made = torch.unflatten(
            rms_norm(x, layer.before.shape, layer.before, self._eps) @ layer.qkv.T, -1, (-1, self._size)
        )
        turned, value = torch.split(made, [self._queries + self._keys, self._keys], dim=-2)
        cosine, sine = turn
        first, second = turned.chunk(2, dim=-1)
        turned = turned * cosine + torch.cat([-second, first], -1) * sine
        return *torch.split(turned, [self._queries, self._keys], dim=-2), value

    def _after(self, layer: _Layer, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        x = x + seen.flatten(-2) @ layer.out.T
        gate, up = (rms_norm(x, layer.between.shape, layer.between, self._eps) @ layer.gate_up.T).chunk(2, dim=-1)
        return x + (silu(gate) * up) @ layer.down.T

    def _rotation(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines [..., 1, size]."""
        angles = positions[..., None, None] * self._frequencies.repeat(2)
        return angles.cos().to(self._dtype), angles.sin().to(self._dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    before: torch.Tensor
    qkv: torch.Tensor
    out: torch.Tensor
    between: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class _Batch:
    """The buffers of B rows.

    tokens, positions  i64[B]: the newest token of each row, and its place
    logprobs, entropies  f32[B], of the policy, of the newest tokens and the distributions that they are from
    """

    def __init__(self, decoder: Decoder, rows: int, places: int) -> None:
        device, made = decoder._device, decoder._empty
        self._decoder = decoder
        self.places = places
        self.cache = [
            (
                made(rows, decoder._keys, places, decoder._size).zero_(),
                made(rows, decoder._keys, places, decoder._size).zero_(),
            )
            for _ in decoder._layers
        ]
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.positions = torch.zeros_like(self.tokens)
        self.rows = torch.arange(rows, device=device)
        self.columns = torch.arange(places, device=device)
        self.logprobs, self.entropies = torch.zeros(rows, device=device), torch.zeros(rows, device=device)
        self._uniform = torch.full((rows, len(decoder._output)), 0.5, device=device)
        self.logits: torch.Tensor | None = None
        self._graph = self._captured() if decoder._has_graphs else None

    @torch.no_grad()
    def sample(self, generator: torch.Generator) -> None:
        """Sample the next token of every row. Equal generators draw equal numbers, whatever the weights."""
        self._uniform.uniform_(generator=generator)
        if self.logits is not None:
            self._choose(self.logits)
            self.logits = None
        elif self._graph is not None:
            self._graph.replay()
        else:
            self._next()

    def _next(self) -> None:
        self._choose(self._decoder.next_logits(self))

    def _choose(self, logits: torch.Tensor) -> None:
        distribution = torch.log_softmax(logits.float(), dim=-1)
        chosen = (distribution - (-self._uniform.log()).log()).argmax(-1)  # Gumbel's trick
        self.logprobs.copy_(distribution.gather(1, chosen[:, None])[:, 0])
        self.entropies.copy_(-(distribution.exp() * distribution).sum(-1))
        self.tokens.copy_(chosen)
        self.positions.add_(1)

    @torch.no_grad()
    def _captured(self) -> torch.cuda.CUDAGraph:
        """Return the graph of a token; needs no weights that make sense. Leaves positions anywhere."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):  # libraries allocate their buffers
                self._next()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's thread asks for events meanwhile
            self._next()
        return graph
