"""The images of a packed row: each image's patches once, and where the row shows it. Pure.

Tests: tests/unit/policies/batching/test_images.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from asyncrl.messages.images import ImageRef, positions


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePatches:
    """An image of a sequence, with its pixels.

    ref      where the sequence, prompt and response, shows it
    patches  f32[t h w, patch size], as the model's own processor makes them; one array for all places that show it
    """

    ref: ImageRef
    patches: NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedImages:
    """The images of a row of N tokens: P different images, shown at I places. The eight answers of a group show one.

    patches     f32[K, patch size], of all images, one after the other; K is the sum of t h w
    grids       i32[P, 3], patches of each image in time, height and width
    image       i32[I], the image that each place shows; places are in the order of the row
    starts      i32[I], index in the row of each place's first placeholder token
    num_tokens  i32[I], number of placeholder tokens of each place
    positions   i32[3, N], position of each token in its sequence in time, height and width (messages/images.py)
    """

    patches: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    grids: NDArray[np.int32] = field(default_factory=lambda: np.zeros((0, 3), np.int32))
    image: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    starts: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    num_tokens: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    positions: NDArray[np.int32] = field(default_factory=lambda: np.zeros((3, 0), np.int32))

    def __len__(self) -> int:
        """Number of places."""
        return len(self.image)

    @property
    def token_rows(self) -> NDArray[np.int64]:
        """i64[M]: the row's placeholder tokens, in order."""
        return _ranges(self.starts, self.num_tokens)

    @property
    def feature_rows(self) -> NDArray[np.int64]:
        """i64[M]: what replaces each of ``token_rows``, among the vision tower's outputs for ``patches``."""
        of_image = np.zeros(len(self.grids), np.int64)
        of_image[self.image] = self.num_tokens
        return _ranges((np.cumsum(of_image) - of_image)[self.image], self.num_tokens)


NO_IMAGES = PackedImages()
"""A row of text alone."""


def pack_images(sequences: Sequence[tuple[int, Sequence[ImagePatches]]]) -> PackedImages:
    """Return the images of a row.  sequences: number of tokens of each, and its images in order"""
    if not any(images for _, images in sequences):
        return NO_IMAGES
    numbers: dict[tuple[str, tuple[int, int, int]], int] = {}
    different, image, places = list[ImagePatches](), list[int](), list[ImageRef]()
    begin = 0
    for length, images in sequences:
        for one in images:
            number = numbers.setdefault((one.ref.digest, one.ref.grid), len(numbers))
            if number == len(different):
                different.append(one)
            image.append(number)
            places.append(one.ref.moved(begin))
        begin += length
    return PackedImages(
        patches=np.concatenate([one.patches for one in different]),
        grids=np.array([one.ref.grid for one in different], np.int32),
        image=np.array(image, np.int32),
        starts=np.array([one.start for one in places], np.int32),
        num_tokens=np.array([one.num_tokens for one in places], np.int32),
        positions=np.concatenate(
            [positions(length, [one.ref for one in images]) for length, images in sequences], axis=1
        ),
    )


def tokens_by_image(sequences: Sequence[tuple[NDArray[np.int32], Sequence[ImagePatches]]]) -> list[NDArray[np.int32]]:
    """Return the tokens of each sequence, with a number below 0 for each image in place of its placeholders.

    Sequences that begin alike then begin with the same images, too.  sequences: tokens and images of each
    """
    numbers: dict[tuple[str, tuple[int, int, int]], int] = {}
    made = []
    for tokens, images in sequences:
        own = tokens.copy() if images else tokens
        for one in images:
            number = numbers.setdefault((one.ref.digest, one.ref.grid), len(numbers))
            own[one.ref.start : one.ref.end] = -1 - number
        made.append(own)
    return made


def _ranges(starts: NDArray[np.int32] | NDArray[np.int64], counts: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return ``starts[i]`` to ``starts[i] + counts[i] - 1`` of every i, joined, i64."""
    counted = counts.astype(np.int64)
    within = np.arange(counted.sum()) - np.repeat(np.cumsum(counted) - counted, counted)
    rows: NDArray[np.int64] = np.repeat(starts.astype(np.int64), counted) + within
    return rows
