"""Images of arriving groups: checked before they are trained, and kept if an environment showed them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.actors.learner.image_reader import ImageReader
from asyncrl.actors.learner.validator import Validator
from asyncrl.bus.port import Record
from asyncrl.data.tiny_vision_model import make_tiny_vision_model
from asyncrl.images.processor import ImageProcessor
from asyncrl.images.reading import write_png
from asyncrl.images.store import ImageStore, digest_of
from asyncrl.messages import Trajectory, TrajectoryGroup, VersionSpan, replace
from asyncrl.messages.images import ImageRef
from asyncrl.policies.groups.table import GroupTable
from tests.harness.learning import memory_bus

PICTURE = write_png(16, 8, bytes(16 * 8 * 3))  # 2 x 1 tokens
REF = ImageRef(digest=digest_of(PICTURE), grid=(1, 2, 4), start=1, num_tokens=2)


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> ImageProcessor:
    folder = make_tiny_vision_model(tmp_path_factory.mktemp("model"), num_layers=1, vision_layers=1)
    return ImageProcessor(folder)


def group(processor: ImageProcessor, ref: ImageRef = REF, **more: Any) -> TrajectoryGroup:
    answer = Trajectory(
        tokens=np.array([5], np.int32),
        response_mask=np.ones(1, np.bool_),
        behavior_logprobs=np.zeros(1, np.float32),
        version_spans=(VersionSpan(start=0, incarnation=0, policy_version=0),),
        images=(ref,),
    )
    tokens = np.array([4, processor.token, processor.token, 6], np.int32)
    return TrajectoryGroup(group_id=0, prompt_tokens=tokens, trajectories=(answer,), **more)


def test_what_an_environment_showed_is_kept_and_becomes_patches(processor: ImageProcessor, tmp_path: Path) -> None:
    pictures = ImageReader(ImageStore(folder=tmp_path), processor, most_pixels=1000)
    made = group(processor, image_files={REF.digest: PICTURE})
    assert pictures.problem(made) == ""
    assert (tmp_path / REF.digest).read_bytes() == PICTURE
    (one,), (again,) = (pictures.of(made, made.trajectories[0]) for _ in range(2))
    assert one.patches.shape == (8, 96)
    assert again.patches is one.patches


@pytest.mark.parametrize(
    ("ref", "files", "problem"),
    [
        (REF, {}, "is nowhere"),
        (REF, {REF.digest: b"another"}, "has another SHA-256"),
        (REF, {digest_of(b"none"): b"none"}, "no image"),
        (REF, {digest_of(PICTURE[:50]): PICTURE[:50]}, "is damaged"),
        (replace(REF, start=2), {REF.digest: PICTURE}, "are not all placeholders"),
        (replace(REF, start=9), {REF.digest: PICTURE}, "are not all placeholders"),
        (replace(REF, grid=(1, 4, 2)), {REF.digest: PICTURE}, "has the grid"),
    ],
)
def test_images_that_contradict_their_answer_are_not_trained(
    processor: ImageProcessor, tmp_path: Path, ref: ImageRef, files: dict[str, bytes], problem: str
) -> None:
    pictures = ImageReader(ImageStore(folder=tmp_path), processor, most_pixels=1000)
    assert problem in pictures.problem(group(processor, ref, image_files=files))
    if files:
        assert "more than images.max_pixels" in ImageReader(
            ImageStore(folder=tmp_path), processor, most_pixels=10
        ).problem(group(processor, image_files={REF.digest: PICTURE}))


async def test_images_are_read_beside_the_event_loop_and_only_of_answers_that_are_asked_for(
    processor: ImageProcessor, tmp_path: Path
) -> None:
    checked_by: list[threading.Thread] = []

    class Checked(ImageReader):
        def problem(self, group: TrajectoryGroup) -> str:
            checked_by.append(threading.current_thread())
            return super().problem(group)

    table = GroupTable(incarnation=0)
    pictures = Checked(ImageStore(folder=tmp_path), processor, most_pixels=1000)
    validator = Validator(memory_bus(), image_reader=pictures)
    asked = group(processor)
    asked = replace(asked, trajectories=(replace(asked.trajectories[0], reward=1.0),))
    record: Record[TrajectoryGroup] = Record(sequence=1, key="w0/0", message=asked)
    assert await validator.find_image_problem(record, table) == ""
    assert not checked_by
    table.publish(0, position=0)
    problem = await validator.find_image_problem(record, table)
    assert "is nowhere" in problem
    assert checked_by[0] is not threading.main_thread()
    assert validator.check(record, table, image_problem=problem).problem == problem
