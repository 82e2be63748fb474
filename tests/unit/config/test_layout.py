"""The tasks of each learner rank: numbers worked by hand for Megatron's order of ranks."""

from __future__ import annotations

import re
from typing import Any

import pytest

from asyncrl.config.layout import Layout
from asyncrl.errors import ConfigError


def test_ranks_are_tensor_parallel_neighbours_then_context_then_data_then_stages() -> None:
    """16 ranks: 2 tensor x 2 context x 2 data x 2 stages, the fastest dimension first."""
    layout = Layout(ranks=16, tensor=2, context=2, pipeline=2)
    assert layout.data_parallel == 2
    assert [layout.context_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [layout.share(rank) for rank in range(16)] == [0, 0, 0, 0, 1, 1, 1, 1] * 2
    assert [layout.stage(rank) for rank in range(16)] == [0] * 8 + [1] * 8


def test_scores_come_from_one_rank_of_each_copy_with_the_last_stage() -> None:
    assert list(Layout(ranks=4, tensor=2).scorers) == [0, 2]
    assert list(Layout(ranks=16, tensor=2, context=2, pipeline=2).scorers) == [8, 12]


def test_an_export_is_made_by_the_first_copy_without_the_rest_of_its_rows() -> None:
    layout = Layout(ranks=16, tensor=2, context=2, pipeline=2)
    assert [rank for rank in range(16) if layout.is_exporter(rank)] == [0, 1, 8, 9]
    experts = Layout(ranks=8, expert=4)  # ranks of other copies export as well
    assert [rank for rank in range(8) if experts.is_exporter(rank)] == [0, 1, 2, 3]
    assert (layout.exporters, experts.exporters, Layout(ranks=4).exporters) == (4, 4, 1)


def test_peers_share_a_copy_a_stage_or_experts() -> None:
    layout = Layout(ranks=16, tensor=2, context=2, pipeline=2)
    assert list(layout.peers(5)) == [4, 5, 6, 7]
    assert list(Layout(ranks=8, tensor=2, expert=4).peers(5)) == [4, 5, 6, 7]  # two copies share the experts
    assert list(Layout(ranks=2).peers(1)) == [1]


@pytest.mark.parametrize(
    ("sizes", "multiple"),
    [
        ({}, 1),
        ({"tensor": 2}, 1),
        ({"tensor": 2, "is_sequence_parallel": True}, 2),
        ({"context": 2}, 4),
        ({"context": 2, "tensor": 4, "is_sequence_parallel": True}, 8),  # 2 parts of 2 pieces; 4 ranks share a part
    ],
    ids=["alone", "tensor", "sequence", "context", "both"],
)
def test_row_length_divides_among_ranks(sizes: dict[str, Any], multiple: int) -> None:
    assert Layout(ranks=8, **sizes).row_multiple == multiple


WRONG = {
    "no ranks": ({"ranks": 0}, "ranks must be > 0, got 0"),
    "no stages": ({"pipeline": 0}, "pipeline_parallel must be > 0, got 0"),
    "ranks": (
        {"ranks": 6, "tensor": 2, "pipeline": 2},
        "ranks must be a multiple of tensor_parallel x pipeline_parallel (4), got 6",
    ),
    "experts": ({"ranks": 6, "expert": 4}, "ranks must be a multiple of expert_parallel (4), got 6"),
    "one stage": ({"virtual_pipeline": 2}, "set pipeline_parallel to 2 or more"),
    "sequence": ({"is_sequence_parallel": True}, "set tensor_parallel to 2 or more"),
}


@pytest.mark.parametrize(("sizes", "problem"), WRONG.values(), ids=WRONG.keys())
def test_incompatible_layout_sizes_are_refused(sizes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        Layout(**sizes)
