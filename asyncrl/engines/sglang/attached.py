"""An SGLang server that somebody else started (engine.options.url): who may use it, and what it had before us."""

from __future__ import annotations

import logging
from pathlib import Path

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


async def load_model(loader: WeightLoader, folder: Path, *, version: Version, url: str) -> None:
    """Load model.path into a server that has weights of another run or worker. Raises EngineDied.

    The learner announces no weights before the first step, so no load would replace them.
    """
    log.info("the server at %s has weights of another run or worker; it loads model.path", url)
    first = WeightVersion(incarnation=version[0], policy_version=version[1], uri=str(folder))
    try:
        await loader.load(first, folder)
    except WeightsError as error:
        raise EngineDied(
            f"the server at {url} has weights of another run or worker, and cannot load model.path; restart it: {error}"
        ) from error
