"""What weights.channel = "auto" means."""

from __future__ import annotations

import pytest

from asyncrl.adapters import registry
from asyncrl.config import only_overrides


@pytest.mark.parametrize(
    ("options", "pools", "expected"),
    [
        ("{}", "{}", "nccl"),
        ("{tensor_parallel = 2, server_arguments = {dp-size = 2, enable-dp-attention = true}}", "{}", "nccl"),
        ("{server_arguments = {dp-size = 2}}", "{}", "files"),
        ("{server_arguments = {pipeline_parallel_size = 2}}", "{}", "files"),
        ("{}", "{long = {workers = 1, options = {server_arguments = {dp-size = 2}}}}", "files"),
    ],
)
def test_weights_go_from_memory_to_memory_where_every_engine_can_receive_them(
    options: str, pools: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    overrides = ["engine.kind='sglang'", f"engine.options={options}", f"rollout.pools={pools}"]
    assert registry.channel_name(only_overrides(overrides)) == expected
