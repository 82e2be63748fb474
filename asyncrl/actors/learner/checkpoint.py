"""Checkpoints. Each holds the complete state of a run in one folder that exists whole or not at all.

    checkpoints/step-00000050/
      learner.json     incarnation, step, policy version, resume_points, trajectory cursor and what was consumed beyond
                       it, group ledger, prompt position and outstanding prompts, counters, length of history.jsonl
      backend/         weights, optimizer, RNG (written by the backend)
      manifest.json    size and SHA-256 of every file, written last (manifest.py)

The cursor is stored here and not in the broker. A restarted learner reads the log again from the cursor and skips what
the checkpoint records as trained. So in the history of its weights no finished rollout is lost or trained twice.

A damaged checkpoint is renamed to damaged-STEP and never deleted. The learner continues from the checkpoint before it,
for which the log is also kept (checkpointer.py). Other names in the folder are left alone.
Tests: tests/unit/actors/learner/test_checkpoint.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from asyncrl.actors.learner import manifest
from asyncrl.durable_files import sync
from asyncrl.errors import CheckpointDamaged, CheckpointError, disk_problem
from asyncrl.policies.groups.saved import LearnerState, PromptState
from asyncrl.version import SCHEMA

_STATE_FILE: Final = "learner.json"
_NAME: Final = re.compile(r"step-(\d{8,})(?:-epoch-([1-9]\d*))?")
_PARTIAL: Final = re.compile(rf"\.{_NAME.pattern}\.partial")
_DAMAGED: Final = "damaged-"


@dataclasses.dataclass(frozen=True, slots=True)
class UnfinishedCheckpoint:
    """A checkpoint being written. ``partial`` is not taken for a checkpoint; at the end it is renamed to ``final``."""

    partial: Path
    final: Path

    @property
    def backend(self) -> Path:
        return self.partial / "backend"


def begin(directory: Path, state: LearnerState, *, save_backend: Callable[[Path], None]) -> UnfinishedCheckpoint:
    """Begin a checkpoint. ``save_backend`` may continue to write in its folder after it returns. Leftovers of an
    earlier unfinished checkpoint are removed.

    Raises CheckpointError naming the folder. The previous checkpoint is then untouched.
    """
    final = directory / folder_name(state.step, state.incarnation)
    unfinished = UnfinishedCheckpoint(partial=directory / f".{final.name}.partial", final=final)
    with _remove_on_failure(unfinished):
        for path in _entries(directory):
            if _PARTIAL.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
        unfinished.backend.mkdir(parents=True)
        (unfinished.partial / _STATE_FILE).write_text(
            json.dumps({"schema": SCHEMA} | dataclasses.asdict(state), indent=1)
        )
        save_backend(unfinished.backend)
    return unfinished


def finish(
    unfinished: UnfinishedCheckpoint, *, finish_backend: Callable[[], Mapping[Path, str] | None], keep: int
) -> Path | None:
    """Make a checkpoint visible with one rename, once the backend has written its part, and remove all but the newest
    ``keep``. ``finish_backend`` returns the SHA-256 of its
    larger files, or None while it is not done; then this returns None and changes nothing. Raises as ``begin`` does."""
    with _remove_on_failure(unfinished):
        hashed = finish_backend()
        if hashed is None:
            return None
        sync(*unfinished.partial.rglob("*"), unfinished.partial)
        manifest.write(unfinished.partial, hashed=hashed)
        sync(unfinished.partial)
        unfinished.partial.rename(unfinished.final)
        sync(unfinished.final.parent)
    for old in list_complete(unfinished.final.parent)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)  # the next checkpoint removes what cannot be removed now
    return unfinished.final


@contextlib.contextmanager
def _remove_on_failure(unfinished: UnfinishedCheckpoint) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        problem = error if isinstance(error, OSError) else disk_problem(error)
        shutil.rmtree(unfinished.partial, ignore_errors=True)
        if problem is None:
            raise
        before = "the checkpoint before it is untouched"
        raise CheckpointError(f"{unfinished.final}: {problem.strerror or problem}; {before}") from problem


def latest(directory: Path, *, say: Callable[[str], None] = lambda line: None) -> tuple[LearnerState, Path] | None:
    """Return the newest checkpoint whose learner.json is intact, and its backend folder; None if there is none.

    For observers: of the backend's files only the sizes are checked. ``say`` gets a line for each damaged checkpoint.
    """
    for folder in reversed(list_complete(directory)):
        try:
            return read(folder)
        except CheckpointDamaged as error:
            say(str(error))
    return None


def resume(directory: Path, *, say: Callable[[str], None]) -> tuple[LearnerState, Path] | None:
    """Return the newest intact checkpoint and its backend folder, with every file checked; None if there is none.

    Damaged checkpoints are renamed to damaged-STEP, so that they are not used again. ``say`` gets a line for each.
    Raises OSError, with nothing renamed, if a checkpoint cannot be read now: no permission, an I/O error.
    """
    folders = list_complete(directory)
    while folders:
        folder = folders.pop()
        try:
            return read(folder, whole=True)
        except CheckpointDamaged as error:
            then = f"trying {folders[-1].name}" if folders else "there is no checkpoint before it"
            say(f"{error}; {_set_aside(folder)}; {then}")
    return None


def read(folder: Path, *, whole: bool = False) -> tuple[LearnerState, Path]:
    """Read the state of one checkpoint, and return its backend folder. ``whole``: check the hashes of all files, not
    only of learner.json.

    Raises CheckpointDamaged, CheckpointError for another schema, or OSError for what cannot be read now.
    """
    problem = (
        (manifest.find_damage(folder) or _lacks_backend(folder))
        if whole
        else manifest.find_damage(folder, only=_STATE_FILE)
    )
    if problem:
        raise CheckpointDamaged(f"{folder}: is damaged: {problem}")
    try:
        table = json.loads((folder / _STATE_FILE).read_text())
        if type(found := table.pop("schema")) is not int:
            raise ValueError(f"schema is {str(found)[:20]!r}")
        if found != SCHEMA:
            raise CheckpointError(
                f"{folder}: has schema {found}, and this version of asyncrl reads schema {SCHEMA}; resume the run with "
                "the version that wrote it"
            )
        prompts = table.pop("prompts")
        for name in ("outstanding", "oldest_start"):
            prompts[name] = {int(key): value for key, value in prompts[name].items()}
        table["resume_points"] = {int(key): value for key, value in table["resume_points"].items()}
        state = LearnerState(prompts=PromptState(**prompts), **table)
        if folder.name != (name := folder_name(state.step, state.incarnation)):
            raise ValueError(f"it is of {name}")
    except (OSError, *manifest.UNREADABLE) as error:
        if isinstance(error, OSError) and not manifest.is_damage(error):
            raise
        raise CheckpointDamaged(
            f"{folder}: is damaged: {_STATE_FILE} cannot be read: {type(error).__name__} {error}"
        ) from error
    return state, folder / "backend"


def list_complete(directory: Path) -> list[Path]:
    """Return the folders of complete checkpoints, oldest first. A later incarnation is newer at any step."""
    found = {path: match for path in _entries(directory) if (match := _NAME.fullmatch(path.name)) and path.is_dir()}
    return sorted(found, key=lambda path: (int(found[path][2] or 0), int(found[path][1])))


def list_damaged(directory: Path) -> list[str]:
    """Names of the checkpoints that were set aside."""
    return [path.name for path in _entries(directory) if path.name.startswith(_DAMAGED)]


def _entries(directory: Path) -> list[Path]:
    """List a folder, sorted; empty if it does not exist."""
    try:
        return sorted(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _set_aside(folder: Path) -> str:
    """Rename a damaged checkpoint. Return a description of the result."""
    names = (f"{_DAMAGED}{folder.name}" + (f"-{number}" if number else "") for number in itertools.count())
    name = next(name for name in names if not (folder.parent / name).exists())
    try:
        folder.rename(folder.parent / name)
        sync(folder.parent)
    except OSError as error:
        return f"cannot be renamed ({error.strerror})"
    return f"kept as {name}"


def _lacks_backend(folder: Path) -> str:
    found = any(path.is_file() for path in (folder / "backend").rglob("*"))
    if not found and (folder / "backend").is_dir():
        os.listdir(folder / "backend")  # raises why nothing is found: rglob passes over folders that it may not read
    return "" if found else "backend is gone or empty"


def folder_name(step: int, incarnation: int) -> str:
    """Folder name of a checkpoint. An incarnation writes each step once, so no checkpoint ever replaces another."""
    return f"step-{step:08d}" + (f"-epoch-{incarnation}" if incarnation else "")
