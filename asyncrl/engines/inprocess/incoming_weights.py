"""Reads the tensors of a version from its folder or a channel, and checks them before the in-process engine loads
them."""

from __future__ import annotations

import safetensors
import safetensors.torch
import torch

from asyncrl.engines.inprocess.decoder import Decoder
from asyncrl.engines.validation import check_weights
from asyncrl.errors import WeightsError
from asyncrl.messages import WeightVersion
from asyncrl.tensors import weight_files
from asyncrl.tensors.model_tensors import check_layout
from asyncrl.weights.port import Source


def read_weights(weights: WeightVersion, decoder: Decoder) -> dict[str, torch.Tensor]:
    """Read all tensors of a version into memory and check them against the model. Raises WeightsError."""
    folder = check_weights(weights, expected=decoder.shapes, optional=decoder.optional_names)
    try:
        # Read instead of mmap: if a mapped file were truncated, the process would be killed.
        tensors: dict[str, torch.Tensor] = {}
        for path in weight_files.paths(folder):
            tensors |= safetensors.torch.load(path.read_bytes())
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise WeightsError(f"{folder}: {error}") from error
    return tensors


def taken(source: Source, payload: bytes, decoder: Decoder) -> dict[str, torch.Tensor]:
    """Return the tensors that ``source`` yields, checked against the model. Raises WeightsError."""
    where = f"weights from {source.__module__}"
    try:
        tensors = dict(source(payload, decoder.device))
    except WeightsError:
        raise
    except Exception as error:  # raised by the channel's code or its transport
        raise WeightsError(f"{where}: {type(error).__name__}: {error}") from error
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    check_layout(shapes, expected=decoder.shapes, optional=decoder.optional_names, where=where)
    return tensors
