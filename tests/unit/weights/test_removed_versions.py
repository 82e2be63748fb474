"""Versions on disk while another process removes other versions, or files of them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from asyncrl.data.model_folder import check_model
from asyncrl.weights import files
from asyncrl.weights.files import FilesChannel
from tests.harness.engines import Model
from tests.harness.transfers import snapshot


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("model"), seed=0)


def test_version_is_whole_when_files_of_the_previous_one_were_removed(tmp_path: Path, model: Model) -> None:
    channel = FilesChannel(tmp_path, keep=4, model_path=model.folder)
    whole = {path.name for path in Path(publish(channel, model, 0)).iterdir()}
    (tmp_path / "0-0" / "config.json").unlink()
    publish(channel, model, 1)
    assert {path.name for path in (tmp_path / "0-1").iterdir()} == whole
    shutil.rmtree(tmp_path / "0-1")
    publish(channel, model, 2)
    check_model(tmp_path / "0-2")
    assert {path.name for path in (tmp_path / "0-2").iterdir()} == whole


def test_version_is_whole_when_the_previous_one_is_removed_while_linking(
    tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = FilesChannel(tmp_path, keep=4, model_path=model.folder)
    whole = {path.name for path in Path(publish(channel, model, 0)).iterdir()}
    before = (tmp_path / "0-0" / "config.json").read_bytes()
    link = files._link

    def link_and_remove(file: Path, name: Path) -> None:
        link(file, name)
        shutil.rmtree(tmp_path / "0-0", ignore_errors=True)

    monkeypatch.setattr(files, "_link", link_and_remove)
    publish(channel, model, 1)
    assert {path.name for path in (tmp_path / "0-1").iterdir()} == whole
    assert (tmp_path / "0-1" / "config.json").read_bytes() == before


def publish(channel: FilesChannel, model: Model, version: int) -> str:
    return channel.publish(snapshot(model), incarnation=0, policy_version=version).uri
