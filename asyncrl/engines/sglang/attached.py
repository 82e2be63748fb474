"""An SGLang server that somebody else started (engine.options.url): who may use it, and what it had before us."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.config.adapter import RunConfig
from asyncrl.engines.generation import Version
from asyncrl.engines.sglang.adapters import Adapters
from asyncrl.engines.sglang.client import ServerClient
from asyncrl.engines.sglang.versions import Stamps
from asyncrl.engines.sglang.weights import WeightLoader
from asyncrl.errors import ConfigError, EngineDied, EngineError, WeightsError
from asyncrl.messages import WeightVersion

log = logging.getLogger(__name__)


def check_workers(run: RunConfig) -> None:
    """Raise ConfigError if the run starts several workers: they would load their weights into the same server."""
    workers = max(run.rollout.workers, run.rollout.most_workers) + run.num_evaluation_workers
    if workers > 1:
        raise ConfigError(
            f"engine.options.url: one server serves one worker, and this run may start {workers} (rollout.workers, "
            "rollout.most_workers, evaluation.workers); use one, or remove url"
        )


async def unload_left(adapters: Adapters, client: ServerClient) -> None:
    """Unload the adapters that an earlier worker left in the server. A proxy may not have the list of them."""
    try:
        models = await client.get("/v1/models")
    except EngineDied:
        raise
    except EngineError as error:
        log.info("adapters of an earlier worker stay in the server and take memory: %s", error)
        return
    await adapters.unload_left(models)


def other_weights(stamps: Stamps, about: Mapping[str, Any], folder: Path) -> str:
    """Return that the server "has weights of ...", unless they are ours or model.path's; then an empty string.

    about   the server's /model_info. SGLang changes its model_path with every load of a folder. The server may be on
            another machine, where the folder has the same path
    folder  model.path
    """
    stamp, served = str(about.get("weight_version", "")), str(about.get("model_path", ""))
    if stamps.is_ours(stamp):
        return ""
    if stamps.is_foreign(stamp):
        return f"has weights of another run or worker ({stamp})"
    if served and (served == str(folder) or Path(served).resolve() == folder.resolve()):
        return ""
    return f"has the weights of {served or 'an unknown folder'}"


async def load_model(
    loader: WeightLoader, folder: Path, *, version: Version, url: str, found: str, is_paused: bool = False
) -> None:
    """Load model.path into a server that has other weights, or may have them. Raises EngineDied.

    The learner announces no weights before the first step, so no load would replace them.
    found: what is wrong with the server, for messages
    is_paused: whether it may be paused with partly loaded weights
    """
    log.warning("the server at %s %s; it loads model.path, %s", url, found, folder)
    loader.doubt_session()
    if is_paused:
        loader.doubt_weights()
    first = WeightVersion(incarnation=version[0], policy_version=version[1], uri=str(folder))
    try:
        await loader.load(first, folder)
    except WeightsError as error:
        raise EngineDied(
            f"the server at {url} {found}, and cannot load model.path; restart it with --model-path {folder}: {error}"
        ) from error
