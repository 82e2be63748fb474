"""Which images a text shows, and where. The pixels travel apart, by the digest of the image's file (asyncrl/images/).

    text       <|vision_start|> <pad> <pad> <pad> <pad> <pad> <pad> <|vision_end|> How many?
    reference  start 1, num_tokens 6, grid (1, 4, 6): 24 patches, of which the model merges 2 x 2 to a token

Placeholders are found by ``start``, never by their token: a policy may sample the placeholder's token, which is then a
token like any other.

Tests: tests/unit/messages/test_images.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncrl.messages.validation import require

_LARGEST_GRID = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRef:
    """An image of a text.

    digest      SHA-256 of the image's file, 64 hexadecimal digits
    grid        patches in time (1), height and width, before the model merges neighbours
    start       index of its first placeholder token in the text
    num_tokens  number of its placeholder tokens: patches / (merged patches a token)
    """

    digest: str
    grid: tuple[int, int, int]
    start: int
    num_tokens: int

    def __post_init__(self) -> None:
        require(bool(re.fullmatch("[0-9a-f]{64}", self.digest)), "the digest of an image must have 64 digits")
        require(all(1 <= size <= _LARGEST_GRID for size in self.grid), f"an image has the grid {self.grid}")
        require(0 <= self.start < 2**31, f"an image starts at token {self.start}")
        require(
            self.num_tokens >= 1 and self.num_patches == self.num_tokens * self.merge**2,
            f"an image has {self.num_tokens} tokens, and the grid {self.grid}",
        )

    @property
    def num_patches(self) -> int:
        return math.prod(self.grid)

    @property
    def merge(self) -> int:
        """Patches that become a token, along each side."""
        return math.isqrt(self.num_patches // max(1, self.num_tokens))

    @property
    def end(self) -> int:
        """Index of the first token after it."""
        return self.start + self.num_tokens

    def moved(self, by: int) -> ImageRef:
        """Return the reference in a text that has ``by`` more tokens before it."""
        return ImageRef(digest=self.digest, grid=self.grid, start=self.start + by, num_tokens=self.num_tokens)


def check_images(images: Sequence[ImageRef], *, num_tokens: int) -> None:
    """Raise MessageError unless the images follow each other within a text of ``num_tokens``."""
    ends = [0, *(one.end for one in images)]
    require(
        all(one.start >= end for one, end in zip(images, ends, strict=False)) and ends[-1] <= num_tokens,
        f"images must follow each other within {num_tokens} tokens, got {[(one.start, one.end) for one in images[:8]]}",
    )


def positions(num_tokens: int, images: Sequence[ImageRef]) -> NDArray[np.int32]:
    """Return the positions of a text's tokens in time, height and width, i32[3, num_tokens] (M-RoPE, arXiv:2409.12191).

    Text counts up in all three. The tokens of an image share one position in time, and count rows and columns from
    there. The text after it goes on at the largest position + 1.  Example: a token, an image of 2 x 3 tokens, a token

        time    0   1 1 1 1 1 1   4
        height  0   1 1 1 2 2 2   4
        width   0   1 2 3 1 2 3   4
    """
    parts, at, done = list[NDArray[np.int64]](), 0, 0
    for one in images:
        parts.append(np.tile(np.arange(one.start - done) + at, (3, 1)))
        at += one.start - done
        time, height, width = one.grid[0], one.grid[1] // one.merge, one.grid[2] // one.merge
        parts.append(np.indices((time, height, width)).reshape(3, -1) + at)
        at += max(time, height, width)
        done = one.end
    parts.append(np.tile(np.arange(num_tokens - done) + at, (3, 1)))
    return np.concatenate(parts, axis=1).astype(np.int32)
