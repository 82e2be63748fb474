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
import io
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.data.model_folder import read_if_valid
from asyncrl.errors import ConfigError, ImageError, PromptError
from asyncrl.images.processor import Placeholders
from asyncrl.images.reading import read_pixels
from asyncrl.images.store import ImageFile

_AS_THE_LEARNER: Final[Mapping[str, Any]] = {
    # the processor on PIL, as in images/processor.py: the one on torchvision resizes on the GPU, and rounds otherwise
    "disable-fast-image-processor": True,
    # Qwen3-VL's table of places is stretched over an image from corner to corner, as in transformers
    "enable-precise-embedding-interpolation": True,
}
_PATCH: Final = 14
"""Pixels of a side: get_image_feature of models/qwen2_5_vl.py has 1176 = 3 x 2 x 14 x 14 as a constant."""
_PLAIN_TOWERS: Final = ("qwen3_5", "qwen3_5_moe")
_INTERLEAVED: Final = ("qwen3_vl", "qwen3_vl_moe", *_PLAIN_TOWERS)
_PNG: Final = b"\x89PNG"
_CACHE_BYTES: Final = 256 * 2**20


def image_arguments(model_path: Path) -> Mapping[str, Any]:
    """Return options of a server whose model reads images; {} if it reads none, or if the folder cannot be read."""
    try:
        return _AS_THE_LEARNER if Placeholders.of(model_path) is not None else {}
    except (OSError, ValueError, ConfigError):  # the server reports what is wrong
        return {}


def check_vision(model_path: Path) -> None:
    """Raise ConfigError for a model whose images SGLang would see otherwise, without an error. Ignores a folder that
    cannot be read. Published models pass."""
    config = read_if_valid(model_path / "config.json")
    kind, vision = config.get("model_type"), config.get("vision_config") or {}
    text = config.get("text_config") or config
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if kind == "qwen2_5_vl" and vision.get("patch_size", _PATCH) != _PATCH:  # it takes others for the tower's outputs
        raise ConfigError(
            f"model.path: SGLang reads images of Qwen2.5-VL with patches of {_PATCH} pixels alone, and this model's "
            f'have {vision["patch_size"]}; use a Qwen3-VL, or engine.kind = "inprocess"'
        )
    if kind in _INTERLEAVED and not rope.get("mrope_interleaved"):
        raise ConfigError(
            f"model.path: SGLang does not interleave the rotary sections of a {kind} unless its config.json says so, "
            'and training does; add "mrope_interleaved": true beside mrope_section, as published models have it'
        )
    if kind in _PLAIN_TOWERS and vision.get("deepstack_visual_indexes") != []:
        raise ConfigError(
            f"model.path: SGLang gives a {kind} features from the middle of the tower (DeepStack) unless config.json "
            'says otherwise; add "deepstack_visual_indexes": [] to vision_config, as published models have it'
        )


class ImageRequests:
    """Shows images in a server's requests. Makes each file once for the answers of its group, and keeps the last ones.

    cache_bytes  most bytes of PNG in base64 that are kept
    """

    def __init__(self, *, cache_bytes: int = _CACHE_BYTES) -> None:
        self._made: OrderedDict[str, asyncio.Task[str]] = OrderedDict()
        self._most = cache_bytes

    async def show(self, prompt_tokens: NDArray[np.int32], images: Sequence[ImageFile]) -> dict[str, Any]:
        """Return the part of a request's body that shows images; {} without any.

        Raises PromptError for an image that cannot be read, and for a prompt with a placeholder that shows none: a
        policy may have sampled one, and SGLang would take it for an image.
        """
        if not images:
            return {}
        token, kept = int(prompt_tokens[images[0].ref.start]), np.ones(len(prompt_tokens), dtype=bool)
        for one in images:
            kept[one.ref.start + 1 : one.ref.end] = False
        input_ids = prompt_tokens[kept]
        if (count := int((input_ids == token).sum())) != len(images):
            raise PromptError(
                f"the prompt has {count} placeholders for {len(images)} images: an answer before has one that the "
                "policy sampled, and SGLang would take it for an image"
            )
        return {"input_ids": input_ids.tolist(), "image_data": [await self._png(one) for one in images]}

    async def _png(self, image: ImageFile) -> str:
        digest = image.ref.digest
        if (making := self._made.get(digest)) is None:
            making = self._made[digest] = asyncio.create_task(asyncio.to_thread(_as_png, image.data))
        self._made.move_to_end(digest)
        try:
            text = await asyncio.shield(making)  # other answers wait for it, too
        except ImageError as error:
            raise PromptError(f"image {digest[:12]}: {error}") from error
        finally:
            if making.done() and (making.cancelled() or making.exception()):
                self._made.pop(digest, None)  # the next answer tries again
        self._forget_oldest()
        return text

    def _forget_oldest(self) -> None:
        made = [digest for digest, one in self._made.items() if one.done() and not one.exception()]
        num_bytes = sum(len(self._made[digest].result()) for digest in made)
        for digest in made[:-1]:
            if num_bytes <= self._most:
                break
            num_bytes -= len(self._made.pop(digest).result())


def _as_png(data: bytes) -> str:
    """Return an image's file as PNG in base64: a GPU server decodes JPEG on the GPU, where pixels differ."""
    if not data.startswith(_PNG):
        written = io.BytesIO()
        read_pixels(data).save(written, "PNG", compress_level=1)
        data = written.getvalue()
    return base64.b64encode(data).decode()
