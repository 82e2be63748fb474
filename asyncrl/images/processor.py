"""A model's own image processor: from an image's file to the patches that its vision tower reads.

It is transformers' PIL version, on every machine: the one on torchvision rounds otherwise, and the learner and the
engine in this process must see the same patches.

Tests: tests/unit/images/test_processor.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ConfigError, ImageError
from asyncrl.images.reading import ImageInfo, read_pixels
from asyncrl.messages.images import ImageRef

FILE: Final = "preprocessor_config.json"
_FAMILIES: Final = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""Model types whose images become (patches / merge_size^2) placeholder tokens, by the rules of Qwen2-VL."""

_SIZES: Final = {
    "patch_size": "patch_size",
    "merge_size": "spatial_merge_size",
    "temporal_patch_size": "temporal_patch_size",
}
"""Sizes that the processor and the vision tower share, by their names in FILE and in vision_config."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placeholders:
    """How images stand in a model's text.

    token  id of the placeholder's token, which stands once for each image in a template's text
    """

    token: int

    @classmethod
    def of(cls, folder: Path) -> Placeholders | None:
        """Read a model folder; None if its model reads no images. Raises ConfigError if its processor is missing."""
        table = json.loads((folder / "config.json").read_bytes())
        if table.get("model_type") not in _FAMILIES or not isinstance(table.get("image_token_id"), int):
            return None
        if not (folder / FILE).is_file():
            raise ConfigError(f"{folder}: the model reads images, and {FILE} is missing; copy it from the model's hub")
        return cls(token=table["image_token_id"])


class ImageProcessor:
    """Use it from any thread."""

    def __init__(self, folder: Path) -> None:
        """Load the processor of a model folder. Raises ConfigError if the model reads no images."""
        found = Placeholders.of(folder)
        if found is None:
            raise ConfigError(
                f"{folder}: the data shows images, and this model reads none; models that do: Qwen2.5-VL, "
                "Qwen3-VL, Qwen3.5"
            )
        self.token = found.token
        try:
            from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as implementation
        except ImportError as error:
            raise ConfigError(f"images need transformers >= 5.3 and pillow: {error}") from None
        self._resized = implementation.smart_resize
        try:
            self._processor: Any = implementation.Qwen2VLImageProcessorPil.from_pretrained(folder)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{folder / FILE}: {error}") from None
        self._check_sizes(folder)

    def _check_sizes(self, folder: Path) -> None:
        """Raise ConfigError if the tower reads patches of other sizes."""
        vision = json.loads((folder / "config.json").read_bytes()).get("vision_config") or {}
        for ours, name in _SIZES.items():
            size = getattr(self._processor, ours)
            if vision.get(name, size) != size:
                raise ConfigError(
                    f"{folder / FILE}: {ours} is {size}, and vision_config.{name} of config.json {vision[name]}; "
                    "take both files from the same model"
                )

    @property
    def merge(self) -> int:
        """Patches that become a token, along each side."""
        return int(self._processor.merge_size)

    def grid(self, info: ImageInfo) -> tuple[int, int, int]:
        """Return the patches of an image in time, height and width, before they are merged. Raises ImageError."""
        size = self._processor.size
        try:
            height, width = self._resized(
                info.height,
                info.width,
                factor=self._processor.patch_size * self.merge,
                min_pixels=size["shortest_edge"],
                max_pixels=size["longest_edge"],
            )
        except ValueError as error:
            raise ImageError(f"its {info.width}x{info.height} pixels make no patches: {error}") from None
        return (1, height // self._processor.patch_size, width // self._processor.patch_size)

    def num_tokens(self, grid: tuple[int, int, int]) -> int:
        return grid[0] * grid[1] * grid[2] // self.merge**2

    def patches(self, data: bytes) -> tuple[NDArray[np.float32], tuple[int, int, int]]:
        """Return the patches of an image's file, f32[t h w, patch size], and its grid. Raises ImageError."""
        try:
            made = self._processor(images=[read_pixels(data)], return_tensors="np")
        except ValueError as error:
            raise ImageError(f"it cannot be made into patches: {error}") from None
        time, height, width = (int(size) for size in made["image_grid_thw"][0])
        return np.asarray(made["pixel_values"], np.float32), (time, height, width)

    def expand(
        self, tokens: Sequence[int], images: Sequence[tuple[str, tuple[int, int, int]]]
    ) -> tuple[list[int], tuple[ImageRef, ...]]:
        """Repeat the placeholder of each image as often as it has tokens, and return the text and where they are.

        images: digest and grid of each, in order.  Raises ImageError unless the text has one placeholder for each.
        """
        count = sum(token == self.token for token in tokens)
        if count != len(images):
            raise ImageError(f"the text has places for {count} images, and there are {len(images)}")
        expanded, refs, left = list[int](), list[ImageRef](), iter(images)
        for token in tokens:
            if token != self.token:
                expanded.append(token)
                continue
            digest, grid = next(left)
            size = self.num_tokens(grid)
            refs.append(ImageRef(digest=digest, grid=grid, start=len(expanded), num_tokens=size))
            expanded += [token] * size
        return expanded, tuple(refs)
