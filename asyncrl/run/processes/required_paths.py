"""What the processes of a run need on the machines they are on: files that are there, and folders that are shared."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from asyncrl.config import RunConfig
from asyncrl.data.row_files import path_and_slice
from asyncrl.run import registry


def learner_paths(run: RunConfig) -> Mapping[str, Path]:
    """Key of the run file -> what the learner reads."""
    files = [run.data.path] if run.data.path else [file.path for file in run.data.files]
    return {
        **worker_paths(run),
        **{"data.path" if run.data.path else f"data.files: {path}": path_and_slice(path)[0] for path in files},
        **registry.backend_class(run).required_paths(run),
    }


def worker_paths(run: RunConfig) -> Mapping[str, Path]:
    """Key of the run file -> what a rollout worker reads: its tokenizer and what its engine needs."""
    return {"model.path": Path(run.model.path), **registry.engine_class(run).required_paths(run)}


def learner_folders(run: RunConfig) -> Mapping[str, Path]:
    """Where the learner writes what the machine of `asyncrl run` reads: checkpoints, metrics, history."""
    return {"run.directory": run.run_directory}


def worker_folders(run: RunConfig) -> Mapping[str, Path]:
    """Where a worker reads what the learner writes."""
    return registry.channel_class(run).required_paths(run)
