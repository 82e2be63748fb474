"""Stand-in for torchvision.io."""

from __future__ import annotations

import enum

from ._missing import missing


class ImageReadMode(enum.Enum):
    UNCHANGED = 0
    GRAY = 1
    GRAY_ALPHA = 2
    RGB = 3
    RGB_ALPHA = 4


decode_jpeg = missing("decode_jpeg")
decode_image = missing("decode_image")
