"""What the processes of a run need on the machines they are on: files that are there, and folders that are shared."""

from __future__ import annotations

from pathlib import Path

from asyncrl.config import RunConfig

_IN_A_FOLDER = ("files", "nccl")
"""Channels whose weights, or those for who joins late, are in weights.directory."""


def learner_paths(run: RunConfig) -> dict[str, Path]:
    """Key of the run file -> what it reads."""
    models = {"critic": run.critic, "reference": run.reference, "teacher": run.teacher}
    found = {"data.path": run.data.path}
    found |= {f"{name}.path": section.path for name, section in models.items() if section is not None}
    return worker_paths(run) | {key: Path(path) for key, path in found.items() if path}


def worker_paths(run: RunConfig) -> dict[str, Path]:
    """Key of the run file -> what it reads."""
    return {"model.path": Path(run.model.path)}


def learner_folders(run: RunConfig) -> dict[str, Path]:
    """Where it writes what is read on the machine of `asyncrl run`: checkpoints, metrics, history."""
    return {"run.directory": run.run_directory}


def worker_folders(run: RunConfig) -> dict[str, Path]:
    """Where it reads what the learner writes."""
    if run.weights.channel not in _IN_A_FOLDER:
        return {}
    if run.weights.directory:
        return {"weights.directory": run.weights_directory}
    return {"run.directory": run.run_directory}
