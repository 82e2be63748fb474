"""The images that a sample may show its model: those of the prompt, and those of its environment, such as screenshots.

Images of prompts are read from the bus by their digest. Those of an environment come from this worker and travel with
the group that they are of.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import BusError, EngineError, ImageError, PromptError
from asyncrl.images.processor import ImageProcessor
from asyncrl.images.reading import MOST_PIXELS, read_info, upright_file
from asyncrl.images.store import ImageFile, ImageStore
from asyncrl.messages import PromptGroup
from asyncrl.messages.images import ImageRef


class WorkerImages:
    """The images of a worker whose model reads images.

    most_pixels  images.max_pixels
    """

    def __init__(self, store: ImageStore, *, model_path: Path, most_pixels: int = MOST_PIXELS) -> None:
        self.store = store
        self.most_pixels = most_pixels
        self._model_path = model_path

    @functools.cached_property
    def processor(self) -> ImageProcessor:
        return ImageProcessor(self._model_path)


class SampleImages:
    """The images of one sample. Its ``images`` of ``Generate`` (environments/port.py)."""

    def __init__(self, worker: WorkerImages, prompt: PromptGroup) -> None:
        self._worker, self._prompt, self._prompt_tokens = worker, prompt.images, prompt.prompt_tokens
        self._own: dict[str, bytes] = {}

    @property
    def prompt(self) -> tuple[ImageRef, ...]:
        """The images of the group's prompt, in order."""
        return self._prompt

    async def show(
        self, tokens: NDArray[np.int32] | Sequence[int], files: Sequence[bytes], *, start: int = 0
    ) -> tuple[NDArray[np.int32], tuple[ImageRef, ...]]:
        """Return tokens with as many placeholders as the images have, i32[T], and where the images are.

        tokens  of a text with one placeholder for each image
        files   the images' files, PNG, JPEG and the like
        start   number of tokens before these in the context

        Raises ImageError for a file that is no image, is too large, or has no place.
        """
        return await asyncio.to_thread(self.place, tokens, files, start=start)

    def shown(self, images: Sequence[ImageRef] | None, *, tokens: NDArray[np.int32]) -> tuple[ImageRef, ...]:
        """Return the images of a call on ``tokens``: those that it names, or those of the prompt that it continues."""
        if images is not None:
            return tuple(images)
        continues = np.array_equal(tokens[: len(self._prompt_tokens)], self._prompt_tokens)
        return self._prompt if continues else ()

    async def files(self, images: Sequence[ImageRef]) -> tuple[ImageFile, ...]:
        """Return the images' files. Raises PromptError, or EngineError while the bus is away."""
        try:
            return await asyncio.to_thread(self._files, images)
        except ImageError as error:
            raise PromptError(str(error)) from error
        except BusError as error:
            raise EngineError(f"an image cannot be read from the bus now: {error}") from error

    @property
    def own_files(self) -> dict[str, bytes]:
        """The files of the images that the environment showed, by digest."""
        return self._own

    def _files(self, images: Sequence[ImageRef]) -> tuple[ImageFile, ...]:
        return tuple(
            ImageFile(ref=one, data=self._own.get(one.digest) or self._worker.store.get(one.digest)) for one in images
        )

    def place(
        self, tokens: NDArray[np.int32] | Sequence[int], files: Sequence[bytes], *, start: int = 0
    ) -> tuple[NDArray[np.int32], tuple[ImageRef, ...]]:
        """As ``show``, blocking."""
        processor, images = self._worker.processor, list[tuple[str, tuple[int, int, int]]]()
        for number, data in enumerate(files, start=1):
            try:
                upright = upright_file(data, most_pixels=self._worker.most_pixels)
                grid = processor.grid(read_info(upright))
            except ImageError as error:
                raise ImageError(f"image {number}: {error}") from None
            digest = self._worker.store.add(upright)
            if all(digest != one.digest for one in self._prompt):  # the learner has those: a harness sends them back
                self._own[digest] = upright
            images.append((digest, grid))
        expanded, refs = processor.expand(list(tokens), images)
        return np.asarray(expanded, np.int32), tuple(one.moved(start) for one in refs)
