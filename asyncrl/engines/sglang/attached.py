"""An SGLang server that somebody else started (engine.options.url): who may use it, and what it had before us."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.engines.sglang.stamps import Stamps
from asyncrl.engines.sglang.weights import WeightLoader
from asyncrl.engines.version_spans import Version
from asyncrl.errors import ConfigError, EngineDied, WeightsError
from asyncrl.messages import WeightVersion
from asyncrl.protocols.adapter import RunConfig

log = logging.getLogger(__name__)


def check_workers(run: RunConfig) -> None:
    """Raise ConfigError if the run starts several workers: they would load their weights into the same server."""
    workers = max(run.rollout.workers, run.rollout.most_workers) + run.num_evaluation_workers
    if workers > 1:
        raise ConfigError(
            f"engine.options.url: one server serves one worker, and this run may start {workers} (rollout.workers, "
            "rollout.most_workers, evaluation.workers); use one, or remove url"
        )


def other_weights(stamps: Stamps, about: Mapping[str, Any], folder: Path) -> str:
    """Return which weights the server has unless they are ours, or model.path's; otherwise an empty string.

    about   the server's /model_info. SGLang changes its model_path with every load of a folder. The server may be on
            another machine, where the folder has the same path
    folder  model.path
    """
    stamp, served = str(about.get("weight_version", "")), str(about.get("model_path", ""))
    if stamps.is_ours(stamp):
        return ""
    if stamps.is_foreign(stamp):
        return f"weights of another run or worker ({stamp})"
    if served and (served == str(folder) or Path(served).resolve() == folder.resolve()):
        return ""
    return f"the weights of {served or 'an unknown folder'}"


async def load_model(loader: WeightLoader, folder: Path, *, version: Version, url: str, found: str) -> None:
    """Load model.path into a server that has other weights, or may have them. Raises EngineDied.

    The learner announces no weights before the first step, so no load would replace them.
    found: what the server has, for messages
    """
    log.warning("the server at %s has %s; it loads model.path, %s", url, found, folder)
    first = WeightVersion(incarnation=version[0], policy_version=version[1], uri=str(folder))
    try:
        await loader.load(first, folder)
    except WeightsError as error:
        raise EngineDied(
            f"the server at {url} has {found}, and cannot load model.path; restart it with --model-path {folder}: "
            f"{error}"
        ) from error
