"""A rollout worker that the launcher starts has a key, and its name is bound to that key while it runs."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from asyncrl.errors import ConfigError, DiskError
from asyncrl.launch.keys import key_files, worker_keys
from asyncrl.launch.keys.worker_keys import WORKER_KEY_VARIABLE, WORKER_LIFE_VARIABLE, KeyedLauncher
from asyncrl.launch.port import Launcher, ProcessSpec
from asyncrl.messages.signing import SigningKey

LEARNER = "l" * 64


class Started:
    """A launcher that records its start requests."""

    places = False

    def __init__(self) -> None:
        self.specs: list[ProcessSpec] = []
        self.released: list[str] = []

    async def start(self, spec: ProcessSpec) -> None:
        self.specs.append(spec)

    async def release(self, name: str) -> None:
        self.released.append(name)


def spec(name: str, role: str = "rollout-worker") -> ProcessSpec:
    return ProcessSpec(name=name, role=role, arguments=(role, "--name", name), environment={"A": "1"})


async def public_of(launcher: KeyedLauncher, inner: Started, name: str) -> str:
    await launcher.start(spec(name))
    return SigningKey.from_text(inner.specs[-1].environment[WORKER_KEY_VARIABLE]).public


def keyed(inner: Started, folder: Path) -> KeyedLauncher:
    launcher: Launcher = inner  # type: ignore[assignment]
    return KeyedLauncher(launcher, folder=folder)


async def test_its_key_is_in_its_environment_and_nowhere_on_its_command_line(tmp_path: Path) -> None:
    inner = Started()
    await public_of(keyed(inner, tmp_path), inner, "w0")
    (started,) = inner.specs
    assert started.environment["A"] == "1" and len(started.environment[WORKER_KEY_VARIABLE]) == 64
    assert started.arguments == spec("w0").arguments
    assert started.environment[WORKER_KEY_VARIABLE] not in repr(started)
    assert stat.S_IMODE((tmp_path / "workers" / "w0").stat().st_mode) == 0o600


async def test_a_name_is_bound_until_it_is_released(tmp_path: Path) -> None:
    inner = Started()
    launcher, bound = keyed(inner, tmp_path), worker_keys.bound_names(tmp_path, learner=LEARNER)
    assert bound("w0") == ""
    first, second = await public_of(launcher, inner, "w0"), await public_of(launcher, inner, "w1")
    assert (bound("w0"), bound("w1"), bound("guest")) == (first, second, "") and first != second
    await launcher.release("w0")
    assert (bound("w0"), bound("w1"), inner.released) == ("", second, ["w0"])


async def test_it_keeps_its_key_over_restarts_of_itself_and_of_the_launcher(tmp_path: Path) -> None:
    inner = Started()
    launcher = keyed(inner, tmp_path)
    key = await public_of(launcher, inner, "w0")
    assert await public_of(launcher, inner, "w0") == key
    assert await public_of(keyed(inner, tmp_path), inner, "w0") == key


async def test_each_of_its_starts_is_a_later_life_whatever_the_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its messages would be old after the clock goes back (messages/freshness.py): it would seem dead."""
    inner, lives = Started(), []
    for now in (2_000_000_000, 1_000_000_000, 1_000_000_000, 3_000_000_000):
        monkeypatch.setattr(key_files.time, "time_ns", lambda now=now: now * 10**9)
        await keyed(inner, tmp_path).start(spec("w0"))
        for name in (WORKER_KEY_VARIABLE, WORKER_LIFE_VARIABLE):
            monkeypatch.setenv(name, inner.specs[-1].environment[name])
        lives.append(worker_keys.identity("w0", os.environ).life)
        assert WORKER_LIFE_VARIABLE not in os.environ  # its child processes do not inherit the life
    assert lives == sorted(set(lives))


async def test_a_disk_that_takes_no_key_costs_no_restart_and_a_name_that_stays_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    inner = Started()
    launcher, bound = keyed(inner, tmp_path), worker_keys.bound_names(tmp_path, learner=LEARNER)
    key = await public_of(launcher, inner, "w0")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(DiskError, match="keys?.*/workers/w1: cannot be written: No space left on device"):
            await launcher.start(spec("w1"))
        with pytest.raises(ConfigError, match=r"run.directory: .*/names: cannot be written: No space left"):
            keyed(inner, tmp_path)
        await launcher.release("w0")
    assert "names: cannot be written" in caplog.text and inner.released == ["w0"]
    assert bound("w0") == key
    await launcher.start(spec("w1"))
    assert bound("w1") and not partial_files(tmp_path)


def partial_files(folder: Path) -> list[Path]:
    return list(folder.rglob(".*"))


async def test_the_learner_gets_none(tmp_path: Path) -> None:
    inner = Started()
    await keyed(inner, tmp_path).start(spec("learner", role="learner"))
    assert WORKER_KEY_VARIABLE not in inner.specs[0].environment


def test_names_of_the_learners_actors_are_the_learners(tmp_path: Path) -> None:
    bound = worker_keys.bound_names(tmp_path, learner=LEARNER)
    assert [bound(name) for name in ("learner", "prompts", "weights", "w0")] == [LEARNER] * 3 + [""]


def test_a_worker_that_joins_by_itself_makes_a_key_and_has_its_first_digits_in_its_name(tmp_path: Path) -> None:
    one, two = worker_keys.identity("gpu7", os.environ), worker_keys.identity("gpu7", os.environ)
    assert one.key is not None and two.key is not None and one.has_own_key
    assert one.name == f"gpu7-{one.key.public[:16]}" and one.name != two.name
    for bound in (worker_keys.digits_in, worker_keys.bound_names(tmp_path, learner=LEARNER)):
        assert one.key.public.startswith(bound(one.name)) and not two.key.public.startswith(bound(one.name))
        assert [bound(name) for name in ("gpu7", "w0", "gpu7-6bd3", one.name + "x")] == [""] * 4


def test_whom_a_worker_starts_does_not_inherit_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    key = SigningKey.generate()
    monkeypatch.setenv(WORKER_KEY_VARIABLE, key.text())
    found = worker_keys.identity("w0", os.environ)
    assert found.key is not None and (found.name, found.key.public, found.has_own_key) == ("w0", key.public, False)
    assert WORKER_KEY_VARIABLE not in os.environ
    monkeypatch.setenv(WORKER_KEY_VARIABLE, "no key")
    with pytest.raises(ConfigError, match="ASYNCRL_WORKER_KEY: a signing key is 64 hexadecimal digits"):
        worker_keys.identity("w0", os.environ)


def test_a_worker_of_a_run_without_keys_has_none_and_the_name_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORKER_KEY_VARIABLE, "")
    assert worker_keys.identity("w0", os.environ) == worker_keys.Identity("w0", None, has_own_key=False)
