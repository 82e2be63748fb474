"""Read an image's file: what it is, and its pixels, within limits. The only file that imports PIL.

An image is data of a stranger: its size is read from its head and compared with the limits before a pixel is decoded.

Tests: tests/unit/images/test_reading.py.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from asyncrl.errors import ImageError

if TYPE_CHECKING:
    from PIL.Image import Image as Pixels

FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Formats of PIL that are read. Others have decoders that few people look at."""
MOST_PIXELS: Final = 2**26
"""Pixels of an image that anything decodes, 67 million; images.max_pixels is lower."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageInfo:
    """format: one of FORMATS;  width, height: pixels"""

    format: str
    width: int
    height: int

    def __str__(self) -> str:
        return f"{self.format} {self.width}x{self.height}"

    @property
    def mime_type(self) -> str:
        return f"image/{self.format.lower()}"


_ORIENTATION: Final = 0x0112
"""Number of the orientation among EXIF tags."""


def read_info(data: bytes, *, most_pixels: int = MOST_PIXELS) -> ImageInfo:
    """Return what an image is. Decodes no pixels. Raises ImageError: no image, a format not in FORMATS, too large."""
    with _opened(data) as image:
        info = ImageInfo(format=str(image.format), width=image.width, height=image.height)
    if info.width * info.height > most_pixels:
        raise ImageError(f"it has {info.width}x{info.height} pixels, more than images.max_pixels = {most_pixels:,}")
    return info


def read_pixels(data: bytes, *, most_pixels: int = MOST_PIXELS) -> Pixels:
    """Return an image in RGB, on white where it is transparent; of an animation the first frame. Raises ImageError."""
    from PIL import Image, ImageOps

    read_info(data, most_pixels=most_pixels)
    with _opened(data) as image:
        try:
            image.load()
            upright: Any = ImageOps.exif_transpose(image)
            if upright.mode.startswith("I"):  # 16 bits of grey, which PIL would cut off at 255
                upright = upright.point(lambda grey: grey * (1 / 256)).convert("L")
            if upright.mode == "P" or "A" in upright.getbands() or "transparency" in upright.info:
                upright = upright.convert("RGBA")
                upright = Image.alpha_composite(Image.new("RGBA", upright.size, "white"), upright)
            return upright.convert("RGB")  # type: ignore[no-any-return]
        except _BROKEN as error:
            raise ImageError(f"it is damaged: {error}") from None


def upright_file(data: bytes, *, most_pixels: int = MOST_PIXELS) -> bytes:
    """Return the file that is sent: ``data`` if every reader sees the same in it, else its ``read_pixels`` as PNG.

    Readers differ in what they do with transparency, palettes, animations and the orientation that cameras note. The
    engine and the learner must see the same pixels. Raises ImageError.
    """
    pixels = read_pixels(data, most_pixels=most_pixels)
    with _opened(data) as image:
        is_plain = image.format in ("PNG", "JPEG") and image.mode == "RGB" and "transparency" not in image.info
        if is_plain and getattr(image, "n_frames", 1) == 1 and not _is_turned(image):
            return data
    made = io.BytesIO()
    pixels.save(made, "PNG")
    return made.getvalue()


def write_png(width: int, height: int, pixels: bytes) -> bytes:
    """Return a PNG.  pixels: red, green and blue of each pixel, row by row"""
    from PIL import Image

    made = io.BytesIO()
    Image.frombytes("RGB", (width, height), pixels).save(made, "PNG")
    return made.getvalue()


def _is_turned(image: Pixels) -> bool:
    return bool(image.getexif().get(_ORIENTATION, 1) != 1)


def _opened(data: bytes) -> Pixels:
    from PIL import Image, UnidentifiedImageError

    try:
        return Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise ImageError(f"its {len(data):,} bytes are no image of {', '.join(FORMATS)}") from None
    except Image.DecompressionBombError:
        raise ImageError("it has more pixels than any image that is read") from None
    except _BROKEN as error:
        raise ImageError(f"it is damaged: {error}") from None


_BROKEN: Final = (OSError, SyntaxError, ValueError, EOFError, OverflowError, IndexError, KeyError, TypeError)
"""What PIL's decoders raise for damaged files."""
