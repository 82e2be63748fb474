"""What families with a vision tower share: the decoder's part of config.json, and which position turns which frequency.

The tower itself is transformers' module (backends/vision.py); a family lists its weights.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from asyncrl.backends.families.family import Unsupported
from asyncrl.backends.families.shape import VisionTower


def decoder_config(config: Any) -> Any:
    """Return text_config with what config.json says of the whole model: its name, dtype and tied embeddings."""
    own = copy.copy(config.text_config)
    for key in ("architectures", "dtype", "tie_word_embeddings"):
        setattr(own, key, getattr(config, key))
    return own


def tower(
    vision: Any,
    weights: Iterator[str],
    *,
    module: str,
    prefix: str,
    feed_forward_matrices: int,
    num_windowed: int = 0,
    window: int = 0,
    num_layer_features: int = 0,
) -> VisionTower:
    """Return the tower of a vision_config with Qwen's keys.

    weights  names of its weights;  feed_forward_matrices: of a layer;  others: as in VisionTower
    """
    hidden, merged = vision.hidden_size, vision.spatial_merge_size**2
    of_layer = 4 * hidden**2 + feed_forward_matrices * hidden * vision.intermediate_size
    of_merger = (hidden * merged) ** 2 + hidden * merged * vision.out_hidden_size
    of_patch = vision.in_channels, vision.temporal_patch_size, vision.patch_size, vision.patch_size
    return VisionTower(
        module=f"transformers.models.{module}",
        config=vision,
        weights=tuple(weights),
        prefix=prefix,
        patch_size=math.prod(of_patch),
        merged=merged,
        patch_products=math.prod(of_patch) * hidden + vision.depth * of_layer,
        token_products=(1 + num_layer_features) * of_merger,
        size=hidden,
        num_whole=vision.depth - num_windowed,
        num_windowed=num_windowed,
        window=window,
        num_layer_features=num_layer_features,
    )


def sections(sizes: Sequence[int], size: int) -> torch.Tensor:
    """Return ``ModelShape.rope_axes`` where each axis has a section of its own (Qwen2-VL).

    sizes   frequencies of time, height and width;  size: their sum

    >>> sections([2, 1, 1], 4).tolist()
    [0, 0, 1, 2]
    """
    if len(sizes) != 3 or sum(sizes) != size:
        raise Unsupported(f"mrope_section = {list(sizes)} of {size} frequencies")
    return torch.arange(3).repeat_interleave(torch.tensor(sizes))


def interleaved(sizes: Sequence[int], size: int) -> torch.Tensor:
    """Return ``ModelShape.rope_axes`` where the axes take turns, and time has the frequencies that remain (Qwen3-VL).

    >>> interleaved([4, 2, 2], 8).tolist()
    [0, 1, 2, 0, 1, 2, 0, 0]
    """
    if len(sizes) != 3 or sum(sizes) != size:
        raise Unsupported(f"mrope_section = {list(sizes)} of {size} frequencies")
    axes = torch.zeros(size, dtype=torch.int64)
    for axis in (1, 2):
        axes[axis : 3 * sizes[axis] : 3] = axis
    return axes
