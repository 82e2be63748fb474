"""The arithmetic between matrix products equals torch's own layers, and compiles once for any number of rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from asyncrl.backends.kernels import fused

ROWS, GROUPS, QUERIES, SIZE, EPS = 6, 2, 3, 8, 1e-6


def random(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).requires_grad_()


def angles() -> tuple[torch.Tensor, torch.Tensor]:
    return fused.rotary(torch.tensor([0, 1, 2, 0, 1, 2]), torch.tensor([1.0, 0.5, 0.25, 0.125]))


def test_rms_norm_is_that_of_torch() -> None:
    x, weight = random(ROWS, 16), random(16)
    torch.testing.assert_close(fused.rms_norm(x, weight, EPS), F.rms_norm(x, (16,), weight, EPS))


def test_swiglu_gates_the_second_half_with_the_first() -> None:
    x = torch.tensor([[0.0, 2.0, 3.0, 5.0]])
    silu = 2 / (1 + math.exp(-2))
    torch.testing.assert_close(fused.swiglu(x), torch.tensor([[0.0, 5 * silu]]))


def test_each_row_of_a_scored_swiglu_is_multiplied_by_its_score() -> None:
    x, scores = random(ROWS, 8), torch.arange(ROWS).float()
    torch.testing.assert_close(fused.scored_swiglu(x, scores), fused.swiglu(x) * scores[:, None])


def test_a_clamped_swiglu_is_that_of_gpt_oss() -> None:
    """Gate 9 counts as 7 and -9 as itself, up 8 as 7 and -8 as -7; sigmoid(1.702 x 7) is 0.999993, of -9: 2.2e-7."""
    x, scores = torch.tensor([[9.0, -9.0, 8.0, -8.0], [1.0, 0.0, 1.0, 5.0]]), torch.tensor([2.0, 3.0])
    of_seven, of_minus_nine, of_one = (float(torch.sigmoid(torch.tensor(1.702 * gate))) for gate in (7.0, -9.0, 1.0))
    expected = torch.tensor([[2 * 7 * of_seven * 8, 2 * -9 * of_minus_nine * -6], [3 * of_one * 2, 0.0]])
    torch.testing.assert_close(fused.scored_clamped_swiglu(x, scores), expected)


def test_a_rotation_turns_each_pair_by_its_angle() -> None:
    """Pairs are (i, i + size / 2), as in Hugging Face models; row 4 is position 1."""
    mixed = random(ROWS, GROUPS * (QUERIES + 2) * SIZE)
    query, key, value = fused.heads(mixed, *angles(), None, None, GROUPS, SIZE, EPS)
    group = mixed.detach()[4].view(GROUPS, QUERIES + 2, SIZE)[1]
    for rotated, original in ((query[4, GROUPS + 2], group[1]), (key[4, 1], group[QUERIES])):
        turned = torch.polar(torch.ones(4), torch.tensor([1.0, 0.5, 0.25, 0.125])) * torch.complex(
            *original.split(SIZE // 2)
        )
        torch.testing.assert_close(rotated, torch.cat([turned.real, turned.imag]))
    torch.testing.assert_close(value[4, 1], group[QUERIES + 1])


def test_queries_and_keys_are_normalised_before_they_are_rotated() -> None:
    mixed, query_weight, key_weight = random(ROWS, GROUPS * (QUERIES + 2) * SIZE), random(SIZE), random(SIZE)
    query, key, _ = fused.heads(mixed, *angles(), query_weight, key_weight, GROUPS, SIZE, EPS)
    grouped = mixed.view(ROWS, GROUPS, QUERIES + 2, SIZE)
    normed = torch.cat(
        [
            F.rms_norm(grouped[:, :, :-2], (SIZE,), query_weight, EPS),
            F.rms_norm(grouped[:, :, -2:-1], (SIZE,), key_weight, EPS),
            grouped[:, :, -1:],
        ],
        dim=2,
    )
    expected = fused.heads(normed.flatten(1), *angles(), None, None, GROUPS, SIZE, EPS)
    torch.testing.assert_close((query, key), expected[:2])


def test_recomputed_tensors_are_not_saved_and_keep_the_gradient() -> None:
    x, weight = random(ROWS, 16), random(4, 8)
    made: list[int] = []

    def make() -> torch.Tensor:
        made.append(1)
        return fused.swiglu(x)

    gated = fused.swiglu(x)
    with fused.recompute_in_backward((gated, make)):
        out = gated @ weight.T
    expected = torch.autograd.grad((fused.swiglu(x) @ weight.T).square().sum(), (x, weight))
    assert not made
    torch.testing.assert_close(torch.autograd.grad(out.square().sum(), (x, weight)), expected)
    assert made


CALLS: dict[str, Callable[[int], tuple[Any, ...]]] = {
    "rms_norm": lambda rows: (random(rows, 16), random(16), EPS),
    "swiglu": lambda rows: (random(rows, 16),),
    "row_statistics": lambda rows: (random(rows, 20).detach(), torch.arange(rows) - 1, 0.7),
    "logits_gradient": lambda rows: (
        random(rows, 20).detach(),
        torch.arange(rows) - 1,
        torch.ones(rows),
        torch.ones(rows),
        0.7,
    ),
    "logits_gradient_with_entropy": lambda rows: (
        random(rows, 20).detach(),
        torch.arange(rows) - 1,
        torch.ones(rows),
        torch.ones(rows),
        0.7,
        torch.ones(rows),
        torch.ones(rows),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_functions_compile_once_for_any_number_of_rows(name: str) -> None:
    function = getattr(fused, name)
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = fused.on_rows(torch.compile(function.__wrapped__, fullgraph=True, backend=backend))
    for rows in (5, 11, 3):
        arguments = CALLS[name](rows)
        torch.testing.assert_close(compiled(*arguments), function(*arguments))
    assert len(graphs) == 1


@pytest.mark.parametrize(
    "error",
    [
        torch._dynamo.exc.BackendCompilerFailed("inductor", AssertionError("sizes"), None),
        torch._dynamo.exc.FailOnRecompileLimitHit("too many variants"),
    ],
    ids=["the backend fails", "too many variants"],
)
def test_functions_that_do_not_compile_run_eagerly(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(torch, "compile", lambda function, **_: broken)
    on_gpu = SimpleNamespace(is_cuda=True, rows=3)
    plain = fused.fused(lambda x: x.rows)
    assert [plain(on_gpu), plain(on_gpu)] == [3, 3]
    assert caplog.text.count("runs uncompiled") == 1
