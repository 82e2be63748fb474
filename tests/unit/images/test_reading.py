"""Images of strangers: what is read, what is refused, and that all readers see the same pixels."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from asyncrl.errors import ImageError
from asyncrl.images.reading import read_info, read_pixels, upright_file


def file_of(mode: str = "RGB", kind: str = "PNG", size: tuple[int, int] = (4, 2), **how: object) -> bytes:
    made = io.BytesIO()
    Image.new(mode, size, how.pop("color", 0)).save(made, kind, **how)  # type: ignore[arg-type]
    return made.getvalue()


def test_an_image_says_what_it_is() -> None:
    assert str(read_info(file_of(kind="WEBP"))) == "WEBP 4x2"


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "no image"),
        (b"<svg></svg>", "no image"),
        (file_of(kind="TIFF"), "no image of PNG, JPEG"),
        (file_of(kind="PNG")[:45], "damaged"),
    ],
)
def test_what_is_no_image_is_refused_with_its_reason(data: bytes, problem: str) -> None:
    with pytest.raises(ImageError, match=problem):
        read_pixels(data)


def test_a_bomb_is_refused_before_a_pixel_is_decoded() -> None:
    data = file_of(mode="1", size=(9000, 9000))  # a kilobyte that decodes to 243 megabytes
    assert len(data) < 20_000
    with pytest.raises(ImageError, match="9000x9000 pixels, more than"):
        read_pixels(data)


def test_a_plain_file_is_sent_as_it_is() -> None:
    for kind in ("PNG", "JPEG"):
        assert upright_file(data := file_of(kind=kind)) == data


def test_what_readers_would_see_differently_becomes_a_png() -> None:
    turned = Image.Exif()
    turned[0x0112] = 6  # the camera lay on its side
    for data, size in (
        (file_of(mode="RGBA"), (4, 2)),
        (file_of(mode="P"), (4, 2)),
        (file_of(mode="L"), (4, 2)),
        (file_of(kind="JPEG", exif=turned), (2, 4)),
        (file_of(kind="GIF"), (4, 2)),
    ):
        info = read_info(upright_file(data))
        assert (info.format, (info.width, info.height)) == ("PNG", size)


def test_what_is_transparent_is_white() -> None:
    assert np.asarray(read_pixels(file_of(mode="RGBA"))).min() == 255
    assert np.asarray(read_pixels(file_of(transparency=(0, 0, 0)))).min() == 255  # black is, in this file
    assert upright_file(data := file_of(transparency=(0, 0, 0))) != data


def test_sixteen_bits_of_grey_keep_their_shades() -> None:
    made = io.BytesIO()
    Image.fromarray(np.array([[0, 0x8000, 0xFFFF]], np.uint16)).save(made, "PNG")
    assert np.asarray(read_pixels(made.getvalue()))[0, :, 0].tolist() == [0, 128, 255]


def test_an_animation_is_sent_as_its_first_picture() -> None:
    made = io.BytesIO()
    first, second = (Image.new("RGB", (4, 2), colour) for colour in ("red", "blue"))
    first.save(made, "PNG", save_all=True, append_images=[second])
    assert read_pixels(sent := upright_file(made.getvalue())).getpixel((0, 0)) == (255, 0, 0)
    assert b"acTL" not in sent
