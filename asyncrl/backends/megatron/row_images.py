"""The images of a row, as a rank needs them: positions in three axes, and which tokens show which features.

Test: tests/unit/backends/test_vision.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.backends.micro_batches import to_device
from asyncrl.policies.batching.images import PackedImages


@dataclass(frozen=True, slots=True, kw_only=True)
class RowImages:
    """
    positions  i64[3, n] of the tokens of the rank's part, in time, height and width
    places     i64[m]: the tokens among the rank's hidden states that show an image; with sequence parallelism these
               are a piece of the part
    features   i64[m]: the features that they show (backends/vision.py), of all images of the row
    images     the images, on the host
    """

    positions: torch.Tensor
    places: torch.Tensor
    features: torch.Tensor
    images: PackedImages

    @classmethod
    def of_part(
        cls,
        images: PackedImages,
        *,
        first: NDArray[np.int64],
        length: int,
        kept: NDArray[np.int64],
        piece: tuple[int, int],
        device: torch.device,
    ) -> RowImages | None:
        """Return None if the row shows no image.

        first   i64[computed tokens]: the row's token that each is
        length  of the padded row of computed tokens
        kept    i64[n]: the padded row's tokens in the part
        piece   which of the part's equal pieces the rank's hidden states are, and of how many
        """
        if not len(images):
            return None
        feature_of = np.full(images.positions.shape[1], -1)
        feature_of[images.token_rows] = images.feature_rows
        padding = length - len(first)
        padded = np.pad(feature_of[first], (0, padding), constant_values=-1)[kept]
        positions = np.concatenate(
            [images.positions[:, first], np.tile(np.arange(padding, dtype=np.int32), (3, 1))], axis=1
        )
        number, count = piece
        size = len(kept) // count
        own = padded[number * size : (number + 1) * size]
        places = np.flatnonzero(own >= 0)
        moved = to_device(
            {"positions": positions[:, kept].astype(np.int64), "places": places, "features": own[places]}, device
        )
        return cls(**moved, images=images)
