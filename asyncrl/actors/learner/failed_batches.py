"""Keeps batches that could not be trained, and stops a batch that ends the learner's process again and again.

    RUN_DIR/failed_batches/step-00000012/error.txt           one line, then where it was raised
    RUN_DIR/failed_batches/step-00000012/group-45.msgpack    codec.decode(data, TrajectoryGroup) reads it
    RUN_DIR/in_training.json                                 {"45": 1, "46": 1}: how often a process ended with a group

A process that is killed in a step cannot say which batch it trained. So each step notes its groups before it begins.
A process may end for any reason, so groups are given up only after ``MAX_ATTEMPTS`` processes in a row ended with them.
`asyncrl run` forgets at its start how its last time ended: the cause may be mended.

Tests: tests/actors/learner/test_failed_batches.py.
"""

from __future__ import annotations

import contextlib
import json
import logging
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from asyncrl.errors import BackendError, StepFailed
from asyncrl.messages import TrajectoryGroup, codec
from asyncrl.policies.groups.states import BufferedGroup

FOLDER: Final = "failed_batches"
NOTE_FILE: Final = "in_training.json"
MAX_ATTEMPTS: Final = 3

log = logging.getLogger("asyncrl.learner")


class FailedBatches:
    """``directory``: the run's; None keeps nothing and knows nothing of earlier processes."""

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory
        self._deaths = _read_note(directory)

    @contextlib.contextmanager
    def attempt(self, groups: Sequence[BufferedGroup]) -> Iterator[None]:
        """Note that ``groups`` are in training while the block runs.

        Raises StepFailed instead if ``MAX_ATTEMPTS`` processes in a row ended with one of them. The note stays after a
        BackendError, because a rank that is gone may be gone because of these groups.
        """
        ids = [one.group_id for one in groups]
        if doomed := [group_id for group_id in ids if self._deaths.get(group_id, 0) >= MAX_ATTEMPTS]:
            raise StepFailed(f"{MAX_ATTEMPTS} processes in a row ended while they trained group {doomed[0]}")
        self._write_note({str(group_id): self._deaths.get(group_id, 0) + 1 for group_id in ids})
        is_suspect = False
        try:
            yield
        except BackendError as error:
            is_suspect = not isinstance(error, StepFailed)
            raise
        finally:
            if not is_suspect:
                self._write_note({})

    def keep(self, groups: Sequence[TrajectoryGroup], *, step: int, error: Exception) -> Path | None:
        """Write a batch that could not be trained and return its folder; None if it cannot be written. Blocks."""
        if self._directory is None:
            return None
        folder = self._directory / FOLDER / f"step-{step:08d}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            where = traceback.format_exception(error.__cause__) if error.__cause__ is not None else []
            (folder / "error.txt").write_text(f"{error}\n{''.join(where)}")
            for group in groups:
                (folder / f"group-{group.group_id}.msgpack").write_bytes(codec.encode(group))
        except OSError as problem:  # a full disk must not end a run that can go on
            log.error("%s: the batch cannot be kept: %s", folder, problem.strerror)
            return None
        return folder

    def _write_note(self, deaths: dict[str, int]) -> None:
        if self._directory is None:
            return
        with contextlib.suppress(OSError):  # without the note, a batch that kills is bounded by run.restarts
            (self._directory / NOTE_FILE).write_text(json.dumps(deaths))


def forget_deaths(directory: Path) -> None:
    """Forget which groups were in training when earlier processes ended."""
    with contextlib.suppress(OSError):
        (directory / NOTE_FILE).unlink()


def _read_note(directory: Path | None) -> dict[int, int]:
    """Return group id -> processes that ended with it; empty if there is no note, or half of one."""
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        if directory is not None:
            found = json.loads((directory / NOTE_FILE).read_text())
            return {int(group_id): int(deaths) for group_id, deaths in found.items()}
    return {}
