"""Images by digest: once on the bus, and never others than those that were asked for."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from asyncrl.bus.memory.stores import Objects
from asyncrl.bus.port import ObjectInfo
from asyncrl.errors import ImageError
from asyncrl.images.store import FOLDER, PREFIX, ImageStore, digest_of, share_images


def test_a_worker_reads_what_the_learner_published(tmp_path: Path) -> None:
    objects = Objects()
    learner, worker = ImageStore(objects=objects, folder=tmp_path), ImageStore(objects=objects)
    digest = learner.add(b"a picture")
    with pytest.raises(ImageError, match="is nowhere"):
        worker.get(digest)
    learner.publish([digest])
    assert worker.get(digest) == b"a picture"
    learner.keep_only([digest])
    assert objects.names() == {PREFIX + digest}
    learner.keep_only([])
    assert not objects.names()
    assert worker.get(digest) == b"a picture"  # from memory
    assert ImageStore(folder=tmp_path).get(digest) == b"a picture"  # an auditor reads the run's folder


class Counted(Objects):
    def __init__(self) -> None:
        super().__init__()
        self.puts: list[str] = []

    def put(self, name: str, blocks: Iterable[bytes | memoryview], *, metadata: Mapping[str, str]) -> ObjectInfo:
        self.puts.append(name)
        return super().put(name, blocks, metadata=metadata)


def test_an_image_travels_once() -> None:
    objects = Counted()
    learner = ImageStore(objects=objects)
    digest = learner.add(b"a picture")
    for _ in range(3):
        learner.publish([digest, digest])
    ImageStore(objects=objects).publish([digest])  # a restarted learner finds it there
    assert objects.puts == [PREFIX + digest]


def test_a_restarted_learner_removes_what_the_one_before_left_on_the_bus() -> None:
    objects = Objects()
    before, learner = ImageStore(objects=objects), ImageStore(objects=objects)
    before.publish([before.add(b"left"), shown := before.add(b"shown")])
    learner.publish([asked := learner.add(b"of the evaluation")], is_kept=True)
    objects.put("weights", [b"1"], metadata={})
    learner.keep_only([shown])
    assert objects.names() == {PREFIX + shown, PREFIX + asked, "weights"}


def test_an_image_that_is_another_is_refused() -> None:
    objects = Objects()
    objects.put(PREFIX + digest_of(b"a cat"), [b"a dog"], metadata={})
    with pytest.raises(ImageError, match="another SHA-256"):
        ImageStore(objects=objects).get(digest_of(b"a cat"))


def test_memory_keeps_the_newest_images(tmp_path: Path) -> None:
    store = ImageStore(folder=tmp_path, cache_bytes=10)
    digests = [store.add(bytes([n]) * 4) for n in range(5)]
    assert len(store._cache) == 2
    assert [store.get(digest)[0] for digest in digests] == [0, 1, 2, 3, 4]  # the others are in the folder


def test_a_branch_has_the_images_of_its_run_and_a_missing_folder_is_named(tmp_path: Path) -> None:
    run, branch = tmp_path / "run", tmp_path / "branch"
    share_images(run, branch)  # of text
    digest = ImageStore(folder=run / FOLDER).add(b"a picture")
    lost = ImageStore(folder=branch / FOLDER)
    with pytest.raises(ImageError, match=f"is nowhere: not in {branch / FOLDER}; put the files of that folder back"):
        lost.get(digest)
    for _ in range(2):
        share_images(run, branch)
    assert lost.get(digest) == b"a picture"


def test_a_copy_that_breaks_off_is_no_image_of_the_branch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_link(*_: Any) -> None:
        raise OSError(errno.EXDEV, "another file system")

    def break_off(source: Path, target: Path) -> None:
        target.write_bytes(source.read_bytes()[:1])
        raise KeyboardInterrupt

    run, branch = tmp_path / "run", tmp_path / "branch"
    digest = ImageStore(folder=run / FOLDER).add(b"a picture")
    monkeypatch.setattr("os.link", no_link)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("shutil.copy2", break_off)
        share_images(run, branch)
    share_images(run, branch)
    assert ImageStore(folder=branch / FOLDER).get(digest) == b"a picture"
