"""Guarantees while several threads of one process load models."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from transformers import PreTrainedModel

from tests.harness.backends import started, tiny_model


def test_models_loaded_at_once_keep_their_tied_weights(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, tied=True)
    tie = PreTrainedModel.tie_weights

    def load() -> None:
        with started("reference", folder):
            pass

    with ThreadPoolExecutor(4) as pool:
        loaded = [pool.submit(load) for _ in range(16)]
    assert all(future.exception() is None for future in loaded)
    assert PreTrainedModel.tie_weights is tie
