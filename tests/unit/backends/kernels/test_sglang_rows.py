"""The learner gives SGLang's kernels what a server gives them. Plain functions stand for the kernels."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.nn import functional as F

from asyncrl.data.tiny_model import make_tiny_model
from asyncrl.tensors.exact_environment import EXACT_ENVIRONMENT
from asyncrl.tensors.transformers_models import LOADING
from tests.harness.backends import sequence
from tests.harness.packing import pack

HEADS, GROUPS, SIZE = 4, 2, 8


def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, scale: float) -> torch.Tensor:
    """Attention of one query [heads, size] over [n, fewer heads, size]."""
    one, keys, values = query[:, None].float(), keys.transpose(0, 1).float(), values.transpose(0, 1).float()
    found = F.scaled_dot_product_attention(one[None], keys[None], values[None], scale=scale, enable_gqa=True)
    return found[0, :, 0].to(query.dtype)


def read(q: Any, o: Any, k: Any, v: Any, *, qo_indptr: Any, kv_indptr: Any, kv_indices: Any, **other: Any) -> None:
    """What stands for the kernel that reads many tokens at once: twice the attention of each."""
    assert other["max_len_extend"] == int(qo_indptr.diff().max())
    assert not other["prefix_lens"].any()
    for begin, end in zip(qo_indptr.tolist(), qo_indptr.tolist()[1:], strict=False):
        for place in range(begin, end):
            seen = kv_indices[begin : place + 1]
            o[place] = 2 * attend(q[place], k[seen], v[seen], scale=other["sm_scale"])


def decode(
    q: Any, k: Any, v: Any, o: Any, ends: Any, keys: Any, sums: Any, _scores: Any, tiles: Any, most: int, **other: Any
) -> None:
    """What stands for the kernel of decoded tokens. It takes sums for as many tiles as the longest token has."""
    assert sums.shape == (len(q), HEADS, most, SIZE)
    for number, (begin, end) in enumerate(zip(ends.tolist(), ends.tolist()[1:], strict=False)):
        seen = keys[begin:end]
        assert most >= int(tiles[number]) == -(-(end - begin) // 256)
        o[number] = attend(q[number], k[seen], v[seen], scale=other["sm_scale"])


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """asyncrl.backends.kernels.sglang_rows with plain functions instead of SGLang's kernels."""
    for name, given in (
        ("sglang.kernels.ops.attention.decode_attention", {"decode_attention_fwd": decode}),
        ("sglang.kernels.ops.attention.extend_attention", {"extend_attention_fwd_unified": read}),
        ("sglang.srt", {"batch_invariant_ops": None}),
    ):
        module = types.ModuleType(name)
        vars(module).update(given)
        monkeypatch.setitem(sys.modules, name, module)
    name = "asyncrl.backends.kernels.sglang_rows"
    for variable in EXACT_ENVIRONMENT:
        monkeypatch.setenv(variable, "")  # importing it sets them; they are put back
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(name)
    sys.modules.pop(name, None)


def test_a_token_is_decoded_if_it_and_the_next_one_were_sampled() -> None:
    """Not the last of an answer, nor the last before words of an environment: the engine reads it with what follows."""
    first, second = sequence(12, seed=0), sequence(5, seed=1)
    assert first.response_mask.tolist() == [False] * 6 + [True] * 4 + [False, True]
    assert second.response_mask.tolist() == [False, False, True, True, True]
    (packed,) = pack([first, second], max_tokens=17)
    found = [packed.is_decoded[begin:end] for begin, end in zip(packed.boundaries, packed.boundaries[1:], strict=False)]
    by_length = {len(one): np.flatnonzero(one).tolist() for one in found}
    assert by_length == {12: [6, 7, 8], 5: [2, 3]}


def test_decoded_tokens_see_their_own_prefix_and_the_others_are_read(rows: Any) -> None:
    """Two sequences, of which the first has tokens on both sides of a tile of 256 keys."""
    length = 270
    query, key, value = (torch.randn(2, heads, length, SIZE).bfloat16() for heads in (HEADS, GROUPS, GROUPS))
    is_decoded = torch.zeros(2, length, dtype=torch.bool)
    is_decoded[0, [3, 255, 256, 268]] = is_decoded[1, 1:3] = True
    parts = rows.decoded_tokens(is_decoded)
    found, _ = rows.attention(None, query, key, value, None, scaling=0.5, decoded=parts)
    true = F.scaled_dot_product_attention(
        query.float(), key.float(), value.float(), is_causal=True, scale=0.5, enable_gqa=True
    ).transpose(1, 2)
    true[~is_decoded] *= 2
    torch.testing.assert_close(found.float(), true, atol=0.02, rtol=0.02)
    assert rows.decoded_tokens(torch.zeros(2, 5, dtype=torch.bool)) == []


def test_many_decoded_tokens_are_computed_in_several_launches(rows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_LAUNCHED_TOKENS", 4)
    parts = rows.decoded_tokens(torch.ones(2, 5, dtype=torch.bool))
    assert [len(one.tokens) for one in parts] == [4, 4, 2]
    assert [one.keys[one.ends[0] : one.ends[1]].tolist() for one in parts] == [[0], [0, 1, 2, 3, 4], [5, 6, 7, 8]]


def test_a_model_attends_so_and_has_ordinary_gradients(rows: Any, tmp_path: Path) -> None:
    make_tiny_model(tmp_path, hidden_size=HEADS * SIZE, num_heads=HEADS, num_kv_heads=GROUPS, initializer_range=0.2)
    with LOADING:
        made: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokens = torch.randint(4, 40, (2, 9), generator=torch.Generator().manual_seed(0))
    found = []
    for is_exact in (False, True):
        made.zero_grad()
        attended = {}
        if is_exact:
            rows.use_attention(made)
            attended = {"decoded": rows.decoded_tokens(torch.ones(2, 9, dtype=torch.bool))}
        with torch.autocast("cpu", torch.bfloat16, enabled=is_exact):
            hidden = made.base_model(input_ids=tokens, use_cache=False, **attended).last_hidden_state.float()
        (made.get_output_embeddings()(hidden).log_softmax(-1)[..., 7].mean()).backward()
        found.append({name: parameter.grad.clone() for name, parameter in made.named_parameters()})
    for name, ordinary in found[0].items():
        assert (found[1][name] - ordinary).norm() < 0.1 * ordinary.norm(), name  # bf16: 0.007 to 0.03


def test_products_that_two_ranks_share_are_rounded_before_they_are_added(rows: Any) -> None:
    model = torch.nn.ModuleDict(
        {"o_proj": torch.nn.Linear(8, 6, bias=False), "q_proj": torch.nn.Linear(8, 6)}
    ).bfloat16()
    whole, given = model["o_proj"], torch.randn(2, 3, 8).bfloat16()
    weight = whole.weight
    rows.divide_products(model, 1)
    assert model["o_proj"] is whole
    rows.divide_products(model, 2)
    assert type(model["q_proj"]) is torch.nn.Linear
    assert model["o_proj"].weight is weight
    assert [name for name, _ in model.named_parameters()] == ["o_proj.weight", "q_proj.weight", "q_proj.bias"]
    halves = [F.linear(given[..., part], weight[:, part]) for part in (slice(4), slice(4, 8))]
    assert torch.equal(model["o_proj"](given), halves[0] + halves[1])


def test_logprobs_have_the_sampler_s_rounding(rows: Any) -> None:
    logits = torch.randn(3, 50)
    expected = torch.log_softmax((logits.bfloat16().float() / 0.7).bfloat16(), -1).float()
    assert torch.equal(rows.log_softmax(logits, 0.7), expected)
    assert torch.equal(rows.log_softmax(logits, torch.full((3, 1), 0.7)), expected)
