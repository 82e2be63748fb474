"""Images of a packed row: each picture once, and its places in every sequence that shows it."""

from __future__ import annotations

import numpy as np

from asyncrl.messages.images import ImageRef
from asyncrl.policies.batching.images import NO_IMAGES, ImagePatches, pack_images


def picture(name: str, *, start: int, grid: tuple[int, int, int] = (1, 2, 4)) -> ImagePatches:
    size = grid[0] * grid[1] * grid[2]
    ref = ImageRef(digest=name * 64, grid=grid, start=start, num_tokens=size // 4)
    return ImagePatches(ref=ref, patches=np.full((size, 3), int(name), np.float32))


def test_a_row_of_text_carries_no_images() -> None:
    assert pack_images([(5, ()), (4, ())]) is NO_IMAGES
    assert len(NO_IMAGES) == 0


def test_answers_that_show_one_picture_carry_its_patches_once() -> None:
    packed = pack_images([(5, [picture("1", start=1)]), (6, [picture("1", start=2)])])
    assert packed.patches.shape == (8, 3)
    assert packed.image.tolist() == [0, 0]
    assert packed.starts.tolist() == [1, 7]  # 2 in the second sequence, which begins at 5
    assert packed.token_rows.tolist() == [1, 2, 7, 8]
    assert packed.feature_rows.tolist() == [0, 1, 0, 1]


def test_places_find_the_rows_of_their_own_picture() -> None:
    large = picture("2", start=4, grid=(1, 4, 4))  # 4 tokens
    packed = pack_images([(9, [picture("1", start=0), large]), (3, ()), (4, [picture("2", start=0, grid=(1, 4, 4))])])
    assert packed.grids.tolist() == [[1, 2, 4], [1, 4, 4]]
    assert packed.token_rows.tolist() == [0, 1, 4, 5, 6, 7, 12, 13, 14, 15]
    assert packed.feature_rows.tolist() == [0, 1, 2, 3, 4, 5, 2, 3, 4, 5]


def test_positions_begin_anew_in_every_sequence() -> None:
    packed = pack_images([(4, [picture("1", start=1)]), (2, ())])
    assert packed.positions.tolist() == [[0, 1, 1, 3, 0, 1], [0, 1, 1, 3, 0, 1], [0, 1, 2, 3, 0, 1]]
