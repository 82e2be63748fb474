"""References to images: what a message may say, and the positions of a text with images."""

from __future__ import annotations

import numpy as np
import pytest

from asyncrl.errors import MessageError
from asyncrl.messages.images import ImageRef, check_images, positions

DIGEST = "ab" * 32


def ref(start: int = 1, *, grid: tuple[int, int, int] = (1, 4, 6), num_tokens: int = 6) -> ImageRef:
    return ImageRef(digest=DIGEST, grid=grid, start=start, num_tokens=num_tokens)


def test_an_image_of_2_by_3_tokens_takes_three_positions() -> None:
    # token, image of 2 x 3 tokens, token: the example of ``positions``
    assert positions(8, [ref()]).tolist() == [
        [0, 1, 1, 1, 1, 1, 1, 4],
        [0, 1, 1, 1, 2, 2, 2, 4],
        [0, 1, 2, 3, 1, 2, 3, 4],
    ]


def test_text_counts_up_in_all_three() -> None:
    assert np.array_equal(positions(3, []), np.tile(np.arange(3), (3, 1)))


@pytest.mark.parametrize(
    "changed",
    [
        {"digest": "AB" * 32},
        {"digest": "../../secret"},
        {"grid": (1, 4, 5)},  # 20 patches are no 6 tokens
        {"grid": (1, 0, 6)},
        {"num_tokens": 0},
        {"start": -1},
    ],
)
def test_a_reference_that_contradicts_itself_is_refused(changed: dict[str, object]) -> None:
    fields = {"digest": DIGEST, "grid": (1, 4, 6), "start": 1, "num_tokens": 6} | changed
    with pytest.raises(MessageError):
        ImageRef(**fields)  # type: ignore[arg-type]


def test_images_do_not_overlap_and_lie_within_the_text() -> None:
    check_images([ref(1), ref(7)], num_tokens=13)
    for images, length in (([ref(1), ref(6)], 20), ([ref(7), ref(0)], 20), ([ref(1)], 6)):
        with pytest.raises(MessageError, match="follow each other"):
            check_images(images, num_tokens=length)
