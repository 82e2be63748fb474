"""One atomic checkpoint: everything a run is, in one folder that exists whole or not at all.

    checkpoints/step-00000050/
      learner.json     run epoch, step, policy version, forks, trajectory cursor and what was consumed beyond it,
                       group ledger, prompt position and outstanding prompts, counters, adapted staleness bound,
                       length of history.jsonl
      backend/         weights, optimizer, RNG (written by the backend)

The cursor lives here and not in the broker: a restarted learner reads the log again from it and skips what this
checkpoint says was trained, so a finished rollout is neither lost nor trained twice in the history its weights have.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from asyncrl.errors import CheckpointError

FORMAT: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptState:
    """Where the prompt source is.

    next_group_id  id of the next group to publish
    position       rows of the endless shuffled data read so far, over-long ones included
    outstanding    group id -> position of each group published and not yet disposed of: published again if the bus
                   lost it
    oldest_start   group id -> oldest policy version that may sample it
    """

    next_group_id: int = 0
    position: int = 0
    overlong: int = 0
    outstanding: dict[int, int] = field(default_factory=dict)
    oldest_start: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerState:
    """What a learner knows besides its backend. Ledgers are as their ``as_json``, ``bound`` as AdaptiveBound.state."""

    run_epoch: int
    step: int
    policy_version: int
    groups: dict[str, Any]
    consumed: dict[str, Any]
    prompts: PromptState
    groups_trained: int = 0
    groups_dropped: int = 0
    groups_buried: int = 0
    groups_filtered: int = 0
    groups_per_batch: int = 0
    forks: dict[int, int] = field(default_factory=dict)
    bound: dict[str, int] = field(default_factory=dict)
    history: int = 0


def write(directory: Path, state: LearnerState, *, save_backend: Callable[[Path], None], keep: int) -> Path:
    """Write a checkpoint, make it visible in one rename, and remove all but the newest ``keep``.

    Raises CheckpointError naming the folder, with the previous checkpoint untouched.
    """
    final = directory / _name(state)
    partial = directory / f".{final.name}.partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        (partial / "backend").mkdir(parents=True)
        save_backend(partial / "backend")
        (partial / "learner.json").write_text(json.dumps({"format": FORMAT} | dataclasses.asdict(state), indent=1))
        _sync_tree(partial)
        partial.rename(final)
        _sync(directory)
        for old in complete(directory)[:-keep]:
            shutil.rmtree(old)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(f"{final}: {error.strerror or error}; the checkpoint before it is untouched") from error
    return final


def latest(directory: Path) -> tuple[LearnerState, Path] | None:
    """The newest complete checkpoint and its backend folder, or None when there is none."""
    folders = complete(directory)
    return read(folders[-1]) if folders else None


def read(folder: Path) -> tuple[LearnerState, Path]:
    """One complete checkpoint and its backend folder."""
    try:
        table = json.loads((folder / "learner.json").read_text())
        if table.pop("format") != FORMAT:
            raise CheckpointError(f"{folder}: written by another version of asyncrl")
        prompts = table.pop("prompts")
        for name in ("outstanding", "oldest_start"):
            prompts[name] = {int(key): value for key, value in prompts.get(name, {}).items()}
        table["forks"] = {int(key): value for key, value in table["forks"].items()}
        return LearnerState(prompts=PromptState(**prompts), **table), folder / "backend"
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder}: cannot be read ({error}); remove it to use the one before") from error


def complete(directory: Path) -> list[Path]:
    """Folders of the checkpoints that are whole, oldest first: a later life of the learner is newer at any step."""
    return sorted(directory.glob("step-*"), key=_order)


def _name(state: LearnerState) -> str:
    """One life of the learner writes a step once: no name comes twice, and no checkpoint ever replaces another."""
    return f"step-{state.step:08d}" + (f"-epoch-{state.run_epoch}" if state.run_epoch else "")


def _order(folder: Path) -> tuple[int, int]:
    _, step, *epoch = folder.name.split("-")
    return (int(epoch[-1]) if epoch else 0, int(step))


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
