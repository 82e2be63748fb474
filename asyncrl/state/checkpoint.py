"""One atomic checkpoint: everything a run is, in one folder that exists whole or not at all.

    checkpoints/step-00000050/
      learner.json     incarnation, step, policy version, forks, trajectory cursor and what was consumed beyond it,
                       group ledger, prompt position and outstanding prompts, counters, adapted staleness bound,
                       length of history.jsonl
      backend/         weights, optimizer, RNG (written by the backend)
      manifest.json    size and SHA-256 of every file, written last (manifest.py)

The cursor lives here and not in the broker: a restarted learner reads the log again from it and skips what this
checkpoint says was trained, so a finished rollout is neither lost nor trained twice in the history its weights have.

A checkpoint that is damaged is renamed to damaged-STEP and never deleted; the learner goes on from the one before, for
which the log is kept as well (actors/learner/checkpointer.py). Other names in the folder are left alone.
Tests: tests/unit/state/test_checkpoint.py.
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

from asyncrl.errors import CheckpointDamaged, CheckpointError, MessageError, disk_problem
from asyncrl.messages import upgrade
from asyncrl.policies.groups.saved import LearnerState, PromptState
from asyncrl.state import manifest

FORMAT: Final = 2
"""Raised when learner.json changes so that an older reader would misread it. Format 1 is read: names have changed."""

_PROBE_BYTES: Final = 2**20
_STATE_FILE: Final = "learner.json"
_NAME: Final = re.compile(r"step-(\d{8,})(?:-epoch-([1-9]\d*))?")
_PARTIAL: Final = re.compile(rf"\.{_NAME.pattern}\.partial")
_DAMAGED: Final = "damaged-"


@dataclasses.dataclass(frozen=True, slots=True)
class Begun:
    """A checkpoint that is being written: nobody takes ``partial`` for one. It becomes ``final`` at the end."""

    partial: Path
    final: Path

    @property
    def backend(self) -> Path:
        return self.partial / "backend"


def write(directory: Path, state: LearnerState, *, save_backend: Callable[[Path], None], keep: int) -> Path:
    """Write a checkpoint, make it visible in one rename, and remove all but the newest ``keep``.

    Raises CheckpointError naming the folder, with the previous checkpoint untouched.
    """
    begun = begin(directory, state, save_backend=save_backend)
    folder = finish(begun, finish_backend=lambda: {}, keep=keep)
    assert folder is not None
    return folder


def begin(directory: Path, state: LearnerState, *, save_backend: Callable[[Path], None]) -> Begun:
    """Begin one: ``save_backend`` may go on to write in its folder. What an earlier one left unfinished is removed.

    Raises as ``write`` does.
    """
    final = directory / _name(state)
    begun = Begun(partial=directory / f".{final.name}.partial", final=final)
    with _given_up_on_failure(begun):
        for path in _entries(directory):
            if _PARTIAL.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
        begun.backend.mkdir(parents=True)
        (begun.partial / _STATE_FILE).write_text(json.dumps({"format": FORMAT} | dataclasses.asdict(state), indent=1))
        save_backend(begun.backend)
    return begun


def finish(begun: Begun, *, finish_backend: Callable[[], Mapping[Path, str] | None], keep: int) -> Path | None:
    """Make it visible, once the backend has written its part: then ``finish_backend`` says the SHA-256 of its larger
    files. None, with nothing changed, while that says None. Raises as ``write`` does."""
    with _given_up_on_failure(begun):
        hashed = finish_backend()
        if hashed is None:
            return None
        _sync_tree(begun.partial)
        manifest.write(begun.partial, hashed=hashed)
        _sync(begun.partial)
        begun.partial.rename(begun.final)
        _sync(begun.final.parent)
    for old in complete(begun.final.parent)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)  # what cannot be removed now, the next one removes
    return begun.final


@contextlib.contextmanager
def _given_up_on_failure(begun: Begun) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        problem = error if isinstance(error, OSError) else disk_problem(error) or _refusal(begun.partial)
        shutil.rmtree(begun.partial, ignore_errors=True)
        if problem is None:
            raise
        raise CheckpointError(
            f"{begun.final}: {problem.strerror or problem}; the checkpoint before it is untouched"
        ) from problem


def latest(directory: Path, *, say: Callable[[str], None] = lambda line: None) -> tuple[LearnerState, Path] | None:
    """The newest checkpoint whose learner.json is whole, and its backend folder; None when there is none.

    For who only looks: of what the backend wrote the sizes are checked. ``say`` gets a line for each damaged one.
    """
    for folder in reversed(complete(directory)):
        try:
            return read(folder)
        except CheckpointDamaged as error:
            say(str(error))
    return None


def resume(directory: Path, *, say: Callable[[str], None]) -> tuple[LearnerState, Path] | None:
    """The newest whole checkpoint and its backend folder, every file of it checked; None when there is none.

    Damaged ones are renamed to damaged-STEP, so that nobody takes them again. ``say`` is called with a line for each,
    and with one that names what else is in the folder. Raises OSError, with nothing renamed, when one cannot be read
    now: no permission, an I/O error.
    """
    if others := strangers(directory):
        say(f"{directory}: left alone, not asyncrl's: {', '.join(others)}")
    folders = complete(directory)
    while folders:
        folder = folders.pop()
        try:
            return read(folder, whole=True)
        except CheckpointDamaged as error:
            then = f"trying {folders[-1].name}" if folders else "there is no checkpoint before it"
            say(f"{error}; {_set_aside(folder)}; {then}")
    return None


def read(folder: Path, *, whole: bool = False) -> tuple[LearnerState, Path]:
    """The state of one checkpoint, and its backend folder. ``whole``: every file is checked, not learner.json alone.

    Raises CheckpointDamaged, CheckpointError for a format of a later version, or OSError for what cannot be read now.
    """
    problem = (
        (manifest.damage(folder) or _lacks_backend(folder)) if whole else manifest.damage(folder, only=_STATE_FILE)
    )
    if problem:
        raise CheckpointDamaged(f"{folder}: is damaged: {problem}")
    try:
        table = json.loads((folder / _STATE_FILE).read_text())
        if (found := table.pop("format")) == 1:
            table = upgrade.renamed(table, upgrade.CHECKPOINT)
        elif type(found) is not int:
            raise ValueError(f"format is {str(found)[:20]!r}")
        elif found != FORMAT:
            raise CheckpointError(
                f"{folder}: has format {found!r}, and this version of asyncrl reads 1 to {FORMAT}; resume the run with "
                "the version that wrote it"
            )
        prompts = table.pop("prompts")
        for name in ("outstanding", "oldest_start"):
            prompts[name] = {int(key): value for key, value in prompts.get(name, {}).items()}
        table["forks"] = {int(key): value for key, value in table["forks"].items()}
        state = LearnerState(prompts=PromptState(**prompts), **table)
    except (OSError, MessageError, *manifest.UNREADABLE) as error:
        if isinstance(error, OSError) and not manifest.is_damage(error):
            raise
        raise CheckpointDamaged(
            f"{folder}: is damaged: {_STATE_FILE} cannot be read: {type(error).__name__} {error}"
        ) from error
    problem = state.problem() or ("" if folder.name == _name(state) else f"it is of {_name(state)}")
    if problem:
        raise CheckpointDamaged(f"{folder}: is damaged: {_STATE_FILE} makes no sense: {problem}")
    return state, folder / "backend"


def complete(directory: Path) -> list[Path]:
    """Folders of the checkpoints that are whole, oldest first: a later incarnation is newer at any step."""
    found = {path: match for path in _entries(directory) if (match := _NAME.fullmatch(path.name)) and path.is_dir()}
    return sorted(found, key=lambda path: (int(found[path][2] or 0), int(found[path][1])))


def damaged(directory: Path) -> list[str]:
    """Names of what was set aside."""
    return [path.name for path in _entries(directory) if path.name.startswith(_DAMAGED)]


def strangers(directory: Path) -> list[str]:
    """Names in the folder that asyncrl never gives."""
    ours = set(complete(directory))
    return [
        path.name
        for path in _entries(directory)
        if path not in ours and not _PARTIAL.fullmatch(path.name) and not path.name.startswith(_DAMAGED)
    ]


def _entries(directory: Path) -> list[Path]:
    """Sorted; none where the folder is not there."""
    try:
        return sorted(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _refusal(folder: Path) -> OSError | None:
    """Why the disk cannot be written, asked when a backend failed with an error of its own; None when it can."""
    probe = folder / ".probe"
    try:
        with probe.open("wb") as stream:
            stream.write(bytes(_PROBE_BYTES))
            stream.flush()
            os.fsync(stream.fileno())
        probe.unlink()
    except OSError as error:
        return error
    return None


def _set_aside(folder: Path) -> str:
    """Rename a damaged checkpoint; what came of it."""
    names = (f"{_DAMAGED}{folder.name}" + (f"-{number}" if number else "") for number in itertools.count())
    name = next(name for name in names if not (folder.parent / name).exists())
    try:
        folder.rename(folder.parent / name)
        _sync(folder.parent)
    except OSError as error:
        return f"cannot be renamed ({error.strerror})"
    return f"kept as {name}"


def _lacks_backend(folder: Path) -> str:
    found = any(path.is_file() for path in (folder / "backend").rglob("*"))
    if not found and (folder / "backend").is_dir():
        os.listdir(folder / "backend")  # raises why nothing is found: rglob passes over folders that it may not read
    return "" if found else "backend is gone or empty"


def _name(state: LearnerState) -> str:
    """One incarnation writes a step once: no name comes twice, and no checkpoint ever replaces another."""
    return f"step-{state.step:08d}" + (f"-epoch-{state.incarnation}" if state.incarnation else "")


def _sync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
