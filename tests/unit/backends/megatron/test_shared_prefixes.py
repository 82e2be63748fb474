"""Tokens that sequences share are computed once, and everything is as if each sequence had its own.

Other layouts than one rank: test_layouts.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from asyncrl.backends.kernels import flash, fused
from asyncrl.backends.megatron import packed_attention, shared_prefixes, sink_attention
from asyncrl.backends.megatron.packed_attention import Pieces, attention
from asyncrl.backends.megatron.row_part import RowPart
from asyncrl.backends.micro_batches import Rectangles, response_rows
from asyncrl.backends.models import AuxiliaryModel
from asyncrl.backends.optimizer_settings import Lora
from asyncrl.backends.port import Backend
from asyncrl.config.layout import Layout
from asyncrl.messages.support import Support
from asyncrl.policies.batching.packing import MicroBatch, TrainingSequence, pack_for_ranks, recording, sequence_slices
from asyncrl.policies.batching.prefixes import DistinctTokens
from tests.harness.backends import (
    SETTINGS,
    critic,
    distance,
    learned,
    started,
    tiny_model,
    weights,
    with_returns,
)
from tests.harness.prefixes import random_tree, trained, trees

CPU = torch.device("cpu")
GENTLE = dataclasses.replace(SETTINGS, eps=0.1, max_grad_norm=1e6)
QUICK = ("qwen3", "gemma3", "deepseek_v3", "gpt_oss")
FAMILIES = (*QUICK, "qwen2", "llama", "mistral", "glm4", "mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe")

# -- attention ---------------------------------------------------------------------------------------------------------


def row_of(seed: int, number: int) -> MicroBatch:
    """Return a row that shares everything that it can, whether or not it is worth it."""
    sequences = sorted(trained(random_tree(seed, num_sequences=number)), key=lambda one: one.tokens.tolist())
    ((row,),) = pack_for_ranks([one for one in sequences], ranks=1, max_tokens=10_000)
    order = [row.tokens[where].tolist() for where in sequence_slices(row)]
    common = [0]
    for before, own in zip(order, order[1:], strict=False):
        common.append(
            next((n for n, (a, b) in enumerate(zip(before, own, strict=False)) if a != b), min(map(len, (before, own))))
        )
    return dataclasses.replace(row, shared=np.array(common, np.int32))


@given(st.integers(0, 10_000), st.integers(1, 14), st.sampled_from([0, 5]), st.sampled_from([1, 2, 4]), st.booleans())
def test_attention_and_its_gradients_are_those_of_each_sequence_alone(
    seed: int, number: int, window: int, ranks: int, has_sinks: bool
) -> None:
    row = row_of(seed, number)
    distinct = DistinctTokens.from_row(row.boundaries, row.shared)
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(len(distinct.first), heads, 8, generator=generator).requires_grad_() for heads in (4, 2, 2)]
    sinks = torch.randn(4, generator=generator).requires_grad_()
    wanted = torch.randn(len(row.tokens), 4, 8, generator=generator)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, how: Rectangles | Pieces) -> torch.Tensor:
        if has_sinks:
            return sink_attention.attention_with_sinks(query, key, value, sinks, how, window=window)
        return attention(query, key, value, how, window=window)

    def with_gradients(attended: torch.Tensor) -> list[torch.Tensor]:
        """Return the output of each sequence, and gradients that differ from sequence to sequence."""
        leaves = [*inputs, sinks] if has_sinks else inputs
        return [attended, *torch.autograd.grad((attended * wanted).sum(), leaves)]

    of = torch.from_numpy(distinct.of)
    plain = dataclasses.replace(row, shared=row.shared[:0])
    whole = RowPart.from_micro_batch(
        plain, response_rows(row), layout=Layout(), context_rank=0, device=CPU, dtype=torch.float32
    )
    query, key, value = (x[of] for x in inputs)
    expected = with_gradients(attend(query, key, value, whole.attention))
    parts = []
    for rank in range(ranks):
        part = RowPart.from_micro_batch(
            row,
            response_rows(row),
            layout=Layout(ranks=ranks, context=ranks),
            context_rank=rank,
            device=CPU,
            dtype=torch.float32,
        )
        query, key, value = (torch.cat([x, x.new_zeros(part.length - len(x), *x.shape[1:])]) for x in inputs)
        how = part.attention
        if isinstance(how, Pieces):
            how = dataclasses.replace(how, order=None)  # all keys are local here; ranks gather them
        kept = torch.arange(part.length) if part.kept is None else part.kept
        parts.append((kept, attend(query[kept], key, value, how)))
    attended = torch.cat([one for _, one in parts])[torch.cat([kept for kept, _ in parts]).argsort()]
    for got, one in zip(with_gradients(attended[of]), expected, strict=True):
        torch.testing.assert_close(got, one, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_runs_are_attended_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """With variable-length kernels a row is one piece, whose keys are copied in the backward pass again."""
    row = row_of(1, 9)
    part = partial(
        RowPart.from_micro_batch, row, response_rows(row), layout=Layout(), context_rank=0, device=CPU, dtype=dtype
    )
    rectangles = part().attention
    monkeypatch.setattr("asyncrl.backends.megatron.row_part.uses_varlen", lambda *_: True)
    pieces = part().attention
    assert isinstance(rectangles, Rectangles)
    assert isinstance(pieces, Pieces)
    (piece,) = pieces.pieces
    assert piece.queries == slice(0, row.num_computed)
    assert piece.key_boundaries[-1] == len(pieces.copies) > row.num_computed  # type: ignore[arg-type]
    assert (piece.query_boundaries.diff() > 0).all()

    class Kernel(torch.autograd.Function):
        """Keeps its keys as FlashAttention does."""

        @staticmethod
        def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(query, key, value)
            return by_runs(query, key, value)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            with torch.enable_grad():
                return torch.autograd.grad(by_runs(*leaves), leaves, gradient)

    def by_runs(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        attended = [
            packed_attention.plain(*(x.transpose(0, 1)[None] for x in (query[q], key[k], value[k])), window=0)
            for q, k in piece.runs
        ]
        return torch.cat([one[0].transpose(0, 1) for one in attended])

    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(row.num_computed, n, 8, generator=generator).to(dtype).requires_grad_() for n in (4, 2, 2)]
    query, key, value = inputs
    expected = attention(query, key, value, rectangles)
    monkeypatch.setattr(packed_attention, "uses_varlen", lambda *_: True)
    monkeypatch.setattr(flash, "attention", lambda q, k, v, piece, window: Kernel.apply(q, k, v))  # type: ignore[no-untyped-call]
    recompute, again = fused.recompute_in_backward, list[int]()

    def counted(make: Callable[[], torch.Tensor]) -> torch.Tensor:
        again.append(1)
        return make()

    monkeypatch.setattr(
        shared_prefixes,
        "recompute_in_backward",
        lambda *tensors: recompute(*((one, partial(counted, make)) for one, make in tensors)),
    )
    attended = attention(query, key, value, pieces)
    tolerance: dict[str, Any] = {"atol": 1e-5, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 3e-2, "rtol": 3e-2}
    torch.testing.assert_close(attended, expected, **tolerance)
    for got, one in zip(*(torch.autograd.grad(x.square().sum(), inputs) for x in (attended, expected)), strict=True):
        torch.testing.assert_close(got, one, **tolerance)
    assert again == [1, 1]  # keys and values: the kernel has kept neither


def test_rectangles_lose_no_token_and_have_few_queries_of_shared_ones() -> None:
    for seed in range(30):
        row = row_of(seed, 12)
        distinct = DistinctTokens.from_row(row.boundaries, row.shared)
        queries, keys, order = shared_prefixes.rectangles(row, distinct)
        assert np.concatenate([one.ravel() for one in queries])[order].tolist() == list(range(row.num_computed))
        for one, seen in zip(queries, keys, strict=True):
            np.testing.assert_array_equal(seen[:, seen.shape[1] - one.shape[1] :], one)


# -- models ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Results:
    """outputs: of each sequence by model;  recorded: what a step tells of each sequence"""

    outputs: Mapping[tuple[str, int], NDArray[np.float32]]
    recorded: Mapping[int, NDArray[np.float32]]
    metrics: Mapping[str, float]
    gradients: Mapping[str, torch.Tensor]
    weights: Mapping[str, torch.Tensor]

    @classmethod
    def of(
        cls, backend: Backend, sequences: list[TrainingSequence], *, shares: bool, models: Sequence[str], at: Path
    ) -> Results:
        """Train a critic, if there is one, score with all models, train the policy, and go back to the beginning."""
        cut = pack_for_ranks(sequences, ranks=1, max_tokens=1000, shares_prefixes=shares)
        assert any(len(row.shared) for row in cut[0]) == shares
        backend.save(at)
        outputs, metrics = dict[tuple[str, int], NDArray[np.float32]](), dict[str, float]()
        if "critic" in models:
            metrics |= backend.step(with_returns(cut), learning_rate=0.05, model="critic").metrics
        for model in models:
            for row, output in zip(cut[0], backend.forward(cut, model=model)[0], strict=True):
                assert len(output) == row.num_tokens
                for index, where in zip(row.sequences.tolist(), sequence_slices(row), strict=True):
                    outputs[model, index] = output[where]
        (marked,) = recording([cut], range(len(sequences)))
        result = backend.step(marked, learning_rate=0.05)
        gradients, after = gradients_of(backend), weights(backend)
        backend.restore(at)
        return cls(outputs, result.tokens, learned(result.metrics) | metrics, gradients, after)


def gradients_of(backend: Any) -> dict[str, torch.Tensor]:
    parameters = backend._rank._loaded["policy"]._parameters
    return {name: one.main_grad.clone() for name, one in parameters.items() if hasattr(one, "main_grad")}


def assert_same_as_whole(
    folder: Path,
    tmp_path: Path,
    sequences: list[TrainingSequence],
    *,
    auxiliary: Mapping[str, AuxiliaryModel] | None = None,
    **settings: Any,
) -> Results:
    """Assert that sharing gives what whole sequences give, on one backend. Return the results of sharing."""
    models = ("policy", *(auxiliary or {}))
    with started("megatron-1", folder, **({"optimizer": GENTLE, "auxiliary": auxiliary or {}} | settings)) as backend:
        shared, whole = (
            Results.of(backend, sequences, shares=shares, models=models, at=tmp_path / f"saved-{shares}")
            for shares in (True, False)
        )
    assert shared.outputs.keys() == whole.outputs.keys()
    for of, output in whole.outputs.items():
        np.testing.assert_allclose(shared.outputs[of], output, atol=1e-5, err_msg=str(of))
    assert shared.recorded.keys() == whole.recorded.keys() == set(range(len(sequences)))
    for number, values in whole.recorded.items():
        np.testing.assert_allclose(shared.recorded[number], values, atol=1e-5)
    assert shared.metrics == pytest.approx(dict(whole.metrics), rel=1e-5, abs=1e-5)
    assert distance(dict(shared.gradients), dict(whole.gradients)) < 1e-5
    assert distance(dict(shared.weights), dict(whole.weights)) < 1e-5
    return shared


@pytest.mark.parametrize(
    "architecture", [one if one in QUICK else pytest.param(one, marks=pytest.mark.slow) for one in FAMILIES]
)
def test_every_family_learns_the_same(architecture: str, tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "model", architecture=architecture)
    shared = assert_same_as_whole(folder, tmp_path, trees(num_sequences=20))
    assert max(float(one.abs().max()) for one in shared.gradients.values()) > 0.01


def test_critic_and_reference_say_the_same_of_every_sequence(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "model")
    auxiliary = {
        "critic": dataclasses.replace(critic(folder), optimizer=GENTLE),
        "reference": AuxiliaryModel(path=folder),
    }
    shared = assert_same_as_whole(folder, tmp_path, trees(1, num_sequences=20), auxiliary=auxiliary)
    assert max(np.abs(values).max() for (model, _), values in shared.outputs.items() if model == "critic") > 0.01


def test_adapters_learn_the_same_with_recomputation(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "model")
    lora = Lora(rank=4, alpha=8.0, modules=("all-linear",), is_merged=False)
    optimizer = dataclasses.replace(GENTLE, lora=lora)
    assert_same_as_whole(folder, tmp_path, trees(2), optimizer=optimizer, options={"recompute": "full"})


def test_replayed_experts_are_those_of_each_sequence_and_the_balance_counts_every_copy(tmp_path: Path) -> None:
    """Some samples of a prompt were routed in the same way, others were not, and of one nothing is known."""
    folder = tiny_model(tmp_path / "model", architecture="qwen3_moe")
    random = np.random.default_rng(0)
    prompt, made = random.integers(0, 50, 20), []
    ways = [random.integers(0, 8, (26, 2, 2)).astype(np.uint8) for _ in range(2)]
    for i in range(6):
        tokens = np.concatenate([prompt, random.integers(0, 50, 6)]).astype(np.int32)
        experts = np.concatenate([ways[i % 2][:20], random.integers(0, 8, (6, 2, 2)).astype(np.uint8)])
        experts[..., 1] = (experts[..., 0] + 1) % 8  # two different experts
        (one,) = trained([tokens], seed=i)
        made.append(one if i == 5 else dataclasses.replace(one, experts=experts))
    assert_same_as_whole(folder, tmp_path, made, options={"aux_loss_coefficient": 0.3})


def test_a_shared_token_has_the_logprob_of_how_each_sequence_sampled_it(tmp_path: Path) -> None:
    """The same answer three times: at two temperatures, and from three tokens that top_k left."""
    folder = tiny_model(tmp_path / "model")
    (tokens,), own = random_tree(5, num_sequences=1, longest=20), []
    tokens = np.concatenate([tokens, [5, 6, 7, 8]]).astype(np.int32)
    support = Support.of([[]] * (len(tokens) - 4) + [[5, 1, 2], [6, 3, 4], [7, 8, 9], [8, 1, 2]])
    for i, changes in enumerate(({}, {"temperature": 0.6}, {"support": support}, {})):
        (one,) = trained([tokens], seed=i)
        own.append(dataclasses.replace(one, **changes))  # type: ignore[arg-type]
    shared = assert_same_as_whole(folder, tmp_path, own)
    first, *others = (shared.outputs["policy", i] for i in range(4))
    assert [bool(np.allclose(first, other)) for other in others] == [False, False, True]


def test_a_model_with_linear_attention_computes_every_sequence_whole(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "model", architecture="qwen3_next")
    assert_same_as_whole(folder, tmp_path, trees(4))
