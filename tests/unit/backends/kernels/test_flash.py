"""Which FlashAttention kernels are used. The kernels themselves need a GPU: test_on_gpu.py."""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Iterator

import pytest
import torch

from asyncrl.backends.kernels import flash

HEADS = (torch.bfloat16, 128, 2)


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    flash._has_newer.cache_clear()
    yield
    flash._has_newer.cache_clear()


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "4.0.0b36")


def test_falls_back_silently_when_flash_attention_is_missing(caplog: pytest.LogCaptureFixture) -> None:
    assert not flash._has_newer(*HEADS)
    assert not caplog.records


@pytest.mark.usefixtures("installed")
def test_uses_flash_attention_that_agrees_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "_agrees", lambda *_, **__: True)
    assert flash._has_newer(*HEADS)


@pytest.mark.usefixtures("installed")
def test_rejects_flash_attention_with_other_results(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(flash, "_agrees", lambda *_, **__: False)
    with caplog.at_level(logging.WARNING):
        assert not flash._has_newer(*HEADS)
        assert not flash._has_newer(*HEADS)
    [record] = caplog.records
    assert record.getMessage() == (
        "flash-attn-4 cannot be used with heads of 128, so torch's FlashAttention is: its results differ"
    )
