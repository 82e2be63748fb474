"""The learner's images: those of arriving groups are checked and kept, those of a batch become patches.

Also of a replay, which reads them from the run's folder (RUN/images) and from the groups of the log.

Tests: tests/actors/learner/test_image_reader.py.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.config import RunConfig
from asyncrl.errors import BusError, ImageError
from asyncrl.images.processor import ImageProcessor, Placeholders
from asyncrl.images.reading import read_info, read_pixels
from asyncrl.images.store import FOLDER, ImageStore, digest_of
from asyncrl.messages import Trajectory, TrajectoryGroup
from asyncrl.messages.images import ImageRef
from asyncrl.policies.batching.images import ImagePatches

_CACHE_BYTES: Final = 2**30
"""Most bytes of patches that are kept for the next batch."""


class ImageReader:
    """Blocking; one thread at a time calls ``problem``, another ``of``.  most_pixels: images.max_pixels"""

    def __init__(self, store: ImageStore, processor: ImageProcessor, *, most_pixels: int) -> None:
        self.store, self.processor, self._most_pixels = store, processor, most_pixels
        self._grids: dict[str, tuple[int, int, int]] = {}
        self._patches: OrderedDict[str, NDArray[np.float32]] = OrderedDict()

    @classmethod
    def of_run(
        cls, run: RunConfig, *, store: ImageStore | None = None, directory: Path | None = None
    ) -> ImageReader | None:
        """Return the images of a run; None if its model reads text alone. Raises ConfigError.

        store      None: the folder of images in ``directory``, or in the run's own
        """
        if Placeholders.of(Path(run.model.path)) is None:
            return None
        store = store or ImageStore(folder=(directory or run.run_directory) / FOLDER)
        return cls(store, ImageProcessor(Path(run.model.path)), most_pixels=run.images.max_pixels)

    def problem(self, group: TrajectoryGroup) -> str:
        """Return why the images of a group cannot be trained, "" if they can. Keeps those that environments showed."""
        try:
            for digest, data in group.image_files.items():
                if digest_of(data) != digest:
                    return f"the file of image {digest[:12]} has another SHA-256"
                try:
                    read_pixels(data, most_pixels=self._most_pixels)  # a damaged one would fail its whole batch
                except ImageError as error:
                    return f"image {digest[:12]}: {error}"
                self.store.add(data)
            for trajectory in group.trajectories:
                tokens = np.concatenate([group.prompt_of(trajectory), trajectory.tokens])
                for one in trajectory.images:
                    if problem := self._problem_of(one, tokens):
                        return problem
        except (ImageError, BusError) as error:
            return str(error)
        return ""

    def _problem_of(self, one: ImageRef, tokens: NDArray[np.int32]) -> str:
        name = f"image {one.digest[:12]}"
        if one.end > len(tokens) or (tokens[one.start : one.end] != self.processor.token).any():
            return f"{name} is said to be at tokens {one.start} to {one.end}, and these are not all placeholders"
        if (grid := self._grids.get(one.digest)) is None:
            grid = self._grids[one.digest] = self.processor.grid(read_info(self.store.get(one.digest)))
        return "" if grid == one.grid else f"{name} has the grid {grid}, and {one.grid} in the answer"

    def of(self, group: TrajectoryGroup, trajectory: Trajectory) -> tuple[ImagePatches, ...]:
        """Return the images of a trajectory as patches. Raises ImageError."""
        return tuple(ImagePatches(ref=one, patches=self._patches_of(one)) for one in trajectory.images)

    def _patches_of(self, one: ImageRef) -> NDArray[np.float32]:
        if (known := self._patches.get(one.digest)) is not None:
            self._patches.move_to_end(one.digest)
            return known
        patches, grid = self.processor.patches(self.store.get(one.digest))
        if grid != one.grid:
            raise ImageError(f"image {one.digest[:12]} has the grid {grid}, and {one.grid} in the answer")
        self._patches[one.digest] = patches
        while sum(kept.nbytes for kept in self._patches.values()) > _CACHE_BYTES and len(self._patches) > 1:
            self._patches.popitem(last=False)
        return patches
