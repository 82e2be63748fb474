"""Files that are removed from the folder of a running run are written again."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.adapters import registry
from asyncrl.launch.processes import kept_files
from asyncrl.launch.processes.kept_files import AddressFile

HERE: Any = SimpleNamespace(url="nats://127.0.0.1:1", token="secret")


@contextlib.asynccontextmanager
async def kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[str]]:
    """Start a run in ``folder`` and yield its messages."""
    monkeypatch.setattr(kept_files, "LOOK_SECONDS", 0.001)
    (folder / "keys").mkdir(parents=True)
    (folder / "keys" / "learner").write_text("a secret\n")
    (folder / "keys" / "learner").chmod(0o600)
    (folder / "keys" / "learner.pub").write_text("a key\n")
    AddressFile.of(folder, HERE).write()
    said: list[str] = []
    keeping = asyncio.create_task(kept_files.keep(kept_files.of_run(folder, HERE), say=said.append))
    yield said
    keeping.cancel()
    await asyncio.wait((keeping,))


def test_a_new_run_in_a_used_folder_inherits_no_servers(tmp_path: Path) -> None:
    """Its workers would take versions that the run before left in a server of their own for theirs."""
    kept_files.forget_workers(tmp_path / "new")
    (tmp_path / "logs").mkdir()
    for name in ("w0.engine.owner", "e0.engine.owner", "w0.engine.log"):
        (tmp_path / "logs" / name).touch()
    kept_files.forget_workers(tmp_path)
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["w0.engine.log"]


async def until(said: list[str], count: int) -> None:
    async with asyncio.timeout(120):
        while len(said) < count:
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("text", [None, "", "{}", '{"url": "nats://elsewhere:1", "token": "mine"}'])
async def test_the_address_of_the_bus_is_there_again(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with kept(tmp_path / "n1", monkeypatch) as said:
        file = tmp_path / "n1" / registry.BUS_FILE
        file.unlink() if text is None else file.write_text(text)
        await until(said, 1)
        assert registry.own_address(tmp_path / "n1") == (HERE.url, HERE.token)
        assert file.stat().st_mode & 0o777 == 0o600
    assert said == [f"{file}: was removed or overwritten while the run is up; written again"]


async def test_keys_are_there_again_for_their_owner_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with kept(tmp_path / "n1", monkeypatch) as said:
        keys = tmp_path / "n1" / "keys"
        shutil.rmtree(keys)
        await until(said, 2)
        assert (keys / "learner").read_text() == "a secret\n"
        assert (keys / "learner").stat().st_mode & 0o777 == 0o600
        assert (keys / "learner.pub").read_text() == "a key\n"


async def test_a_folder_that_takes_nothing_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with kept(tmp_path / "n1", monkeypatch) as said:
        file = tmp_path / "n1" / registry.BUS_FILE
        file.unlink()
        file.mkdir()  # a folder that no file can replace
        await until(said, 1)
        await asyncio.sleep(0.05)  # several looks
        file.rmdir()
        await until(said, 2)
    assert "cannot be written again" in said[0]
    assert "written again" in said[1]
    assert len(said) == 2
