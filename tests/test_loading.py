"""What holds while models are loaded in several threads of one process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from transformers import PreTrainedModel

from asyncrl.engines import decoder
from tests.backend_fixtures import started, tiny_model


def test_models_loaded_at_once_keep_their_tied_weights(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, tied=True)
    tie = PreTrainedModel.tie_weights

    def learner() -> None:
        with started("reference", folder):
            pass

    with ThreadPoolExecutor(4) as pool:
        read = [pool.submit(decoder._read_model, folder, dtype="float32") for _ in range(8)]
        done = [pool.submit(learner) for _ in range(8)]
    assert PreTrainedModel.tie_weights is tie
    assert all(future.exception() is None for future in done)
    for model in (future.result() for future in read):
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
        assert model.get_input_embeddings().weight.device == torch.device("cpu")
