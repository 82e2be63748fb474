"""Files that the processes of a run need on their machines, and folders that must be shared."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from asyncrl.adapters import registry
from asyncrl.config import RunConfig
from asyncrl.data.row_files import path_and_slice


def learner_paths(run: RunConfig) -> Mapping[str, Path]:
    """Key of the run file -> path that the learner reads."""
    files = [run.data.path] if run.data.path else [file.path for file in run.data.files]
    return {
        **worker_paths(run),
        **{"data.path" if run.data.path else f"data.files: {path}": path_and_slice(path)[0] for path in files},
        **registry.backend_class(run).required_paths(run),
    }


def worker_paths(run: RunConfig) -> Mapping[str, Path]:
    """Key of the run file -> path that a rollout worker reads: its tokenizer and the files of its engine."""
    return {"model.path": Path(run.model.path), **registry.engine_class(run).required_paths(run)}


def learner_folders(run: RunConfig) -> Mapping[str, Path]:
    """Folders that the learner writes and the machine of `asyncrl run` reads: checkpoints, metrics, history."""
    return {"run.directory": run.run_directory}


def worker_folders(run: RunConfig) -> Mapping[str, Path]:
    """Folders that the learner writes and workers read."""
    return registry.channel_class(run).required_paths(run)
