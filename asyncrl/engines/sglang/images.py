"""Images in requests to an SGLang server, and the options with which it reads them as the learner does.

    text        <|vision_start|> <pad> <pad> <pad> <pad> <|vision_end|> How many?
    input_ids   <|vision_start|> <pad>                   <|vision_end|> How many?
    image_data  the image's file as PNG, in base64

SGLang writes as many placeholders in place of each one as its own processor makes patches (_expand_input_ids in
multimodal/processors/base_processor.py of 0.5.16 and 0.5.23), and keeps the other tokens. It fails a prompt that is
expanded already, and takes every placeholder for an image.

Tests: tests/unit/engines/sglang/test_images.py.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ConfigError, PromptError
from asyncrl.images.processor import Placeholders
from asyncrl.images.reading import read_pixels
from asyncrl.images.store import ImageFile

_SAME_PIXELS: Final[Mapping[str, Any]] = {"disable-fast-image-processor": True}
"""The processor on PIL, as in images/processor.py. The one on torchvision resizes on the GPU, and rounds otherwise."""
_PNG: Final = b"\x89PNG"
_CACHED: Final = 32
"""Files kept for the other answers of their groups."""


def image_arguments(model_path: Path) -> Mapping[str, Any]:
    """Return options of a server whose model reads images; {} if it reads none, or if the folder cannot be read."""
    try:
        return _SAME_PIXELS if Placeholders.of(model_path) is not None else {}
    except (OSError, ValueError, ConfigError):  # the server reports what is wrong
        return {}


async def show_images(prompt_tokens: NDArray[np.int32], images: Sequence[ImageFile]) -> dict[str, Any]:
    """Return the part of a request's body that shows images; {} without any.

    Raises PromptError for a prompt with a placeholder that shows none: a policy may have sampled one, and SGLang would
    take it for an image.
    """
    if not images:
        return {}
    token, kept = int(prompt_tokens[images[0].ref.start]), np.ones(len(prompt_tokens), dtype=bool)
    for one in images:
        kept[one.ref.start + 1 : one.ref.end] = False
    input_ids = prompt_tokens[kept]
    if (count := int((input_ids == token).sum())) != len(images):
        raise PromptError(
            f"the prompt has {count} placeholders for {len(images)} images: an answer before has one that the policy "
            "sampled, and SGLang would take it for an image"
        )
    data = [await asyncio.to_thread(_as_png, one.data) for one in images]
    return {"input_ids": input_ids.tolist(), "image_data": data}


@functools.lru_cache(_CACHED)
def _as_png(data: bytes) -> str:
    """Return an image's file as PNG in base64: a GPU server decodes JPEG on the GPU, where pixels differ."""
    if not data.startswith(_PNG):
        written = io.BytesIO()
        read_pixels(data).save(written, "PNG", compress_level=1)
        data = written.getvalue()
    return base64.b64encode(data).decode()
