"""The images of a row: read, checked, kept in the run's store, and expanded in its prompt.

Tests: tests/unit/data/test_row_images.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.config.images import ImagesSection
from asyncrl.errors import ImageError
from asyncrl.images.parts import MARK, Source
from asyncrl.images.processor import ImageProcessor
from asyncrl.images.reading import read_info, upright_file
from asyncrl.images.sources import read_source
from asyncrl.images.store import ImageStore
from asyncrl.messages.images import ImageRef


@dataclass(frozen=True, slots=True, kw_only=True)
class RowImages:
    """Reads images of rows with the model's own processor.

    key     column with an image, or a list of them; "": images are in the chat messages
    folder  folder of relative paths
    """

    processor: ImageProcessor
    store: ImageStore
    section: ImagesSection
    key: str
    folder: Path

    def column(self, row: Mapping[str, Any]) -> list[Source]:
        """Return where the images of the row's column are."""
        value = row.get(self.key) if self.key else None
        if value is None:
            return []
        return list(value) if isinstance(value, list | tuple) else [value]

    def read(self, sources: Sequence[Source]) -> list[tuple[str, tuple[int, int, int]]]:
        """Return digest and grid of each image. Raises ImageError, which names the image by its number from 1."""
        section = self.section
        if len(sources) > section.max_per_prompt:
            raise ImageError(f"{len(sources)} images, more than images.max_per_prompt = {section.max_per_prompt}")
        found = []
        for number, source in enumerate(sources, start=1):
            try:
                data = read_source(source, folder=self.folder, allow_urls=section.allow_urls)
                data = upright_file(data, most_pixels=section.max_pixels)
                found.append((self.store.add(data), self.processor.grid(read_info(data))))
            except ImageError as error:
                raise ImageError(f"image {number}: {error}") from None
        return found

    def expand(self, tokens: Sequence[int], sources: Sequence[Source]) -> tuple[list[int], tuple[ImageRef, ...]]:
        """Return the tokens with as many placeholders as the images have, and where they are. Raises ImageError."""
        return self.processor.expand(tokens, self.read(sources))

    def mark(self, text: str, tokenizer: Any) -> str:
        """Return a text without a chat template with the model's placeholder for each MARK."""
        return text.replace(MARK, str(tokenizer.convert_ids_to_tokens(self.processor.token)))
