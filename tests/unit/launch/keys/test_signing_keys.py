"""The learner's key: created with the run, kept as long as the run, and secret; and the keys that each role trusts."""

from __future__ import annotations

import dataclasses
import errno
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from asyncrl import config
from asyncrl.actors.learner.history import HISTORY_FILE
from asyncrl.bus import credentials_file
from asyncrl.bus.jetstream import credentials
from asyncrl.bus.memory.bus import MemoryBus
from asyncrl.bus.nats_server import config as nats_config
from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError
from asyncrl.launch.checks import single_learner
from asyncrl.launch.keys import key_files, signing_keys
from asyncrl.messages.codec import encode
from asyncrl.messages.signing import SigningKey
from asyncrl.messages.topics import PROGRESS
from tests import ROOT
from tests.conftest import BUS_SIZES, MAX_MESSAGE_BYTES
from tests.harness.buses import progress


@pytest.fixture
def run(tmp_path: Path) -> RunConfig:
    """A run whose folder exists and is empty."""
    made = config.load(ROOT / "examples" / "demo.toml", [f"run.directory={tmp_path}"])
    made.run_directory.mkdir()
    return made


def test_it_is_made_with_the_run_and_stays(run: RunConfig) -> None:
    key = signing_keys.learner_key(run)
    (run.run_directory / HISTORY_FILE).touch()
    assert signing_keys.learner_key(run) == key == signing_keys.signatures(run, role="learner").learner


def test_the_secret_of_the_tickets_is_made_with_the_run_and_stays(run: RunConfig) -> None:
    secret = signing_keys.ticket_secret(run)
    path = run.run_directory / "keys" / "tickets"
    assert len(secret) == 64 and stat.S_IMODE(path.stat().st_mode) == 0o600
    (run.run_directory / HISTORY_FILE).touch()
    assert signing_keys.ticket_secret(run) == secret


def test_a_run_that_was_begun_without_tickets_goes_on_without(run: RunConfig) -> None:
    signing_keys.learner_key(run)
    (run.run_directory / HISTORY_FILE).touch()
    assert signing_keys.ticket_secret(run) == b""
    assert not (run.run_directory / "keys" / "tickets").exists()


@pytest.mark.parametrize("data", [b"\xcd" * 32, b"ab" * 20, bytes(64)])
def test_a_damaged_secret_of_the_tickets_is_refused_in_one_line(run: RunConfig, data: bytes) -> None:
    assert signing_keys.ticket_secret(run)
    (run.run_directory / "keys" / "tickets").write_bytes(data)
    with pytest.raises(ConfigError, match="keys/tickets: is not the secret of the run's tickets") as refused:
        signing_keys.ticket_secret(run)
    assert "\n" not in str(refused.value)


def test_of_processes_that_make_it_at_once_all_have_the_same(run: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    generate, together = signing_keys.SigningKey.generate, threading.Barrier(4)

    def slowly() -> SigningKey:
        time.sleep(0.05)  # other threads are in the middle of it, too
        return generate()

    def made() -> str:
        together.wait(30)
        return signing_keys.learner_key(run)

    monkeypatch.setattr(signing_keys.SigningKey, "generate", slowly)
    with ThreadPoolExecutor(4) as threads:
        keys = {future.result() for future in [threads.submit(made) for _ in range(4)]}
    assert keys == {(run.run_directory / "keys" / "learner.pub").read_text().strip()}


def test_its_secret_is_its_owners_alone(run: RunConfig) -> None:
    signing_keys.learner_key(run)
    assert stat.S_IMODE((run.run_directory / "keys" / "learner").stat().st_mode) == 0o600


def test_a_run_that_was_begun_without_goes_on_without(run: RunConfig) -> None:
    (run.run_directory / HISTORY_FILE).touch()
    assert signing_keys.learner_key(run) == ""
    assert signing_keys.signatures(run, role="learner").seal(PROGRESS, "", b"said") == b"said"


def test_nothing_is_made_where_no_run_is(run: RunConfig) -> None:
    run.run_directory.rmdir()
    assert signing_keys.signatures(run, role="learner").learner == ""
    assert not run.run_directory.exists()


def test_a_later_process_is_never_taken_for_an_earlier_one(run: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = signing_keys.signatures(run, role="learner")
    for now in (2_000_000_000, 1_000_000_000, 1_000_000_000, 3_000_000_000):  # the clock goes back
        monkeypatch.setattr(key_files.time, "time_ns", lambda now=now: now * 10**9)
        signing_keys._OURS.clear()  # another process
        writer = signing_keys.signatures(run, role="learner")
        assert not reader.open(PROGRESS, "", writer.seal(PROGRESS, "", b"said")).problem


def test_a_worker_believes_the_key_it_is_told_then_the_folders_then_the_first(run: RunConfig) -> None:
    told = dataclasses.replace(run, bus=dataclasses.replace(run.bus, learner_key="a" * 64))
    first = signing_keys.signatures(run, role="rollout-worker", own=SigningKey.generate())
    first.open(PROGRESS, "", learners(run))
    key = signing_keys.learner_key(run)
    assert first.learner == key
    assert signing_keys.signatures(run, role="rollout-worker").learner == key
    assert signing_keys.signatures(told, role="rollout-worker").learner == "a" * 64


def test_a_worker_of_a_run_that_has_lost_its_keys_believes_no_earlier_learner(run: RunConfig) -> None:
    """`asyncrl run` gives workers keys if the run has them. Messages that a learner signed before the keys were removed
    are still on the bus. If a worker trusted them, it would reject all messages of the current learner."""
    assert not signing_keys.signatures(run, role="rollout-worker")._learns
    own = SigningKey.generate()
    assert signing_keys.signatures(run, role="rollout-worker", own=own)._learns


def test_an_observer_believes_no_stranger(run: RunConfig) -> None:
    watcher = signing_keys.signatures(run, role="observer")
    watcher.open(PROGRESS, "", learners(run))
    assert watcher.learner == ""


@pytest.mark.parametrize("text", ["", "no key", "a" * 63])
def test_a_damaged_key_is_refused_in_one_line(run: RunConfig, text: str) -> None:
    signing_keys.learner_key(run)
    (run.run_directory / "keys" / "learner").write_text(text)
    with pytest.raises(
        ConfigError, match="keys/learner: cannot read the learner's key: a signing key is 64 hexadecimal"
    ):
        signing_keys.signatures(run, role="learner")


def test_a_folder_or_a_link_to_itself_in_the_place_of_the_key_is_refused_in_one_line(run: RunConfig) -> None:
    signing_keys.learner_key(run)
    key = run.run_directory / "keys" / "learner"
    key.unlink()
    key.mkdir()
    with pytest.raises(ConfigError, match="cannot read the learner's key: Is a directory"):
        signing_keys.signatures(run, role="learner")
    key.rmdir()
    key.symlink_to(key)
    with pytest.raises(ConfigError, match="cannot read the learner's key: Too many levels of symbolic links"):
        signing_keys.signatures(run, role="learner")


@pytest.mark.parametrize("lost", ["learner", "learner.pub"])
def test_keys_that_a_disk_did_not_take_are_made_at_the_next_start(
    run: RunConfig, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full at the first or the second of the two files."""
    keys, rename = run.run_directory / "keys", Path.rename

    def full(path: Path, target: Path) -> Path:
        if target.name == lost:
            raise OSError(errno.ENOSPC, "No space left on device")
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", full)
        with pytest.raises(ConfigError, match="cannot keep the learner's key there: No space left"):
            signing_keys.learner_key(run)
    assert not (keys / lost).exists()
    key = signing_keys.learner_key(run)
    assert (keys / "learner.pub").read_text().strip() == key
    assert {path.name for path in keys.iterdir()} == {"learner", "learner.pub"}


def test_a_public_key_that_is_none_is_refused_in_one_line_until_the_learner_writes_it(run: RunConfig) -> None:
    key = signing_keys.learner_key(run)
    (run.run_directory / "keys" / "learner.pub").write_text("no key")
    with pytest.raises(ConfigError, match="learner.pub: is not a key of 64 hexadecimal digits; remove it"):
        signing_keys.signatures(run, role="rollout-worker")
    signing_keys.signatures(run, role="learner")
    assert signing_keys.signatures(run, role="rollout-worker").learner == key


def test_all_connections_of_a_process_are_one_life_that_is_taken_once(run: RunConfig) -> None:
    """A disk failure during a reconnect must not look like an unreachable bus."""
    keys, reader = run.run_directory / "keys", signing_keys.signatures(run, role="learner")
    assert not reader.open(PROGRESS, "", learners(run)).problem
    life = keys / "life"
    life.unlink()
    (keys / "learner").write_text("cannot be read meanwhile")
    assert not reader.open(PROGRESS, "", learners(run)).problem
    assert not life.exists()


def test_a_life_that_cannot_be_written_is_said_and_goes_by_the_clock(
    run: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    signing_keys.learner_key(run)
    (run.run_directory / "keys" / "life").mkdir()
    reader = signing_keys.signatures(run, role="learner")
    assert not reader.open(PROGRESS, "", learners(run)).problem
    assert "keys/life: cannot be written: Is a directory; the clock is used instead" in caplog.text


def test_a_key_that_is_none_is_refused_in_the_run_file() -> None:
    with pytest.raises(ConfigError, match="bus: learner_key must be 64 hexadecimal digits, got 'x'"):
        config.only_overrides(["bus.learner_key=x"])


def learners(run: RunConfig) -> bytes:
    return signing_keys.signatures(run, role="learner").seal(PROGRESS, "", b"said")


# -- keys that come with credentials -----------------------------------------------------------------------------------


def written(folder: Path, *words: str) -> Path:
    """Write the files of `bin/nats-config demo`."""
    nats_config.main(["demo", "--directory", str(folder), *words])
    return folder / "demo"


def with_credentials(run: RunConfig, folder: Path) -> RunConfig:
    bus = dataclasses.replace(run.bus, url="nats://host:4222", credentials=f"{folder}/{{role}}")
    return dataclasses.replace(run, bus=bus)


def test_a_run_with_roles_signs_with_the_key_of_its_credentials_and_all_roles_know_it(
    run: RunConfig, tmp_path: Path
) -> None:
    there = with_credentials(run, written(tmp_path / "nats"))
    learner = signing_keys.signatures(there, role="learner")
    assert learner.learner and not (run.run_directory / "keys" / "learner").exists()
    elsewhere = dataclasses.replace(there, run=dataclasses.replace(there.run, directory=str(tmp_path / "elsewhere")))
    for role in ("rollout-worker", "operator", "observer"):
        known = signing_keys.signatures(elsewhere, role=role)
        assert known.learner == learner.learner
        assert not known.open(PROGRESS, "", learner.seal(PROGRESS, "", b"said")).problem


def test_the_learners_secret_is_in_its_own_credentials_alone(tmp_path: Path) -> None:
    folder = written(tmp_path)
    secret = credentials_file.keys(str(folder / "learner"), role="")["signing-key"]
    assert not any(secret in (folder / role).read_text() for role in ("rollout-worker", "operator", "observer"))
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in folder.iterdir())


def test_written_again_keys_and_passwords_stay_unless_keys_are_to_be_rotated(tmp_path: Path) -> None:
    def texts(*words: str) -> list[list[str]]:
        folder = written(tmp_path, *words)
        return [(folder / role).read_text().splitlines() for role in ("learner", "rollout-worker", "observer")]

    before = texts()
    assert texts() == before
    rotated = texts("--rotate-keys")
    assert [lines[0] for lines in rotated] == [lines[0] for lines in before]
    assert all(new[1] != old[1] for new, old in zip(rotated, before, strict=True))


def test_credentials_of_an_older_version_get_their_keys(tmp_path: Path) -> None:
    folder = written(tmp_path)
    for path in folder.iterdir():
        path.write_text(path.read_text().splitlines()[0] + "\n")
    written(tmp_path)
    assert credentials_file.keys(str(folder / "{role}"), role="learner") and len(
        (folder / "learner").read_text().split("\n")
    )
    options = credentials.Credentials(role="rollout-worker", credentials=str(folder / "{role}")).options()
    assert options["user"] == "demo-rollout-worker" and "\n" not in options["password"]


@pytest.mark.parametrize("key", ["", "A" * 64, "a" * 63])
def test_a_worker_with_a_damaged_key_in_its_credentials_does_not_believe_the_first_learner(
    run: RunConfig, tmp_path: Path, key: str
) -> None:
    folder = written(tmp_path / "nats")
    password = (folder / "rollout-worker").read_text().splitlines()[0]
    (folder / "rollout-worker").write_text(f"{password}\nlearner-key: {key}\n")
    there = with_credentials(run, folder)
    with pytest.raises(ConfigError, match="rollout-worker, line 2: must be learner-key: and 64 hexadecimal digits"):
        signing_keys.signatures(there, role="rollout-worker", own=SigningKey.generate())


def test_another_line_in_credentials_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a:b\nsigning-key: none\n")
    with pytest.raises(ConfigError, match="must hold one line USER:PASSWORD"):
        credentials.Credentials(credentials=str(tmp_path / "file")).options()


async def test_a_new_run_under_the_name_of_another_ones_is_refused_and_one_that_goes_on_is_not(
    run: RunConfig, tmp_path: Path
) -> None:
    other = dataclasses.replace(run, run=dataclasses.replace(run.run, directory=str(tmp_path / "other")))
    other.run_directory.mkdir(parents=True)
    bus = MemoryBus(
        **BUS_SIZES, max_message_bytes=MAX_MESSAGE_BYTES, signatures=signing_keys.signatures(run, role="learner")
    )
    await single_learner.of_this_key(bus, run)
    bus._state(PROGRESS).put("", signing_keys.signatures(other, role="learner").seal(PROGRESS, "", encode(progress(1))))
    with pytest.raises(ConfigError, match="another learner has begun a run 'demo' on this bus, with a key that is not"):
        await single_learner.of_this_key(bus, run)
    (run.run_directory / HISTORY_FILE).touch()
    await single_learner.of_this_key(bus, run)
