"""Checks [evaluation] of a run file, and the parts of [checkpoint] that depend on it.

Tests: tests/unit/launch/checks/test_evaluation.py, and the refusals in test_run_file.py in the same folder.
"""

from __future__ import annotations

import logging
import math

from asyncrl.config import RunConfig
from asyncrl.config.toml_text import toml_text
from asyncrl.data.row_files import require_data
from asyncrl.environments import load as rollout_functions
from asyncrl.errors import ConfigError
from asyncrl.policies.evaluation.held import num_held
from asyncrl.policies.evaluation.results import metric_names

log = logging.getLogger("asyncrl.check")


def check_section(run: RunConfig) -> None:
    """Check what every process can see. The files of the data sets are checked by the learner."""
    section, best = run.evaluation, run.checkpoint.best
    if section.is_on and not rollout_functions.traits(run.rollout.function).samples:
        raise ConfigError(
            f'evaluation.place: rollout.function = "{run.rollout.function}" has no engine that could answer; use place '
            '= "folder" and `asyncrl evaluate`'
        )
    if not best:
        return
    name, _, metric = best.partition("/")
    dataset = section.dataset(name)
    assert dataset is not None, "EvaluationSection.check saw to it"
    # the rows are checked in evaluation_sets.require_metric
    known = metric_names(dataset.samples, k=dataset.k, has_labels=True)
    if metric not in known:
        raise ConfigError(f"checkpoint.best: {name} has no metric {metric!r}; it has {', '.join(known)}")


def check_paths(run: RunConfig) -> None:
    for dataset in run.evaluation.datasets:
        if not dataset.path:  # machines that join have no paths, because they open no data
            raise ConfigError(f"evaluation.datasets: {dataset.name}: path is empty; name a file")
        try:
            require_data(dataset.path)
        except ConfigError as error:
            raise ConfigError(f"evaluation.datasets: {dataset.name}: path {error}") from None


def warn_of_share(run: RunConfig) -> None:
    """Warn if one worker, the fewest that an evaluation can hold, is more than the run file allows.

    Only for `asyncrl run` and its check: if the workers are started separately, their number is not yet known.
    """
    section, workers = run.evaluation, run.rollout.workers
    if not section.is_on or section.place != "shared" or not workers:
        return
    held = num_held(section.share, workers)
    if held <= section.share * workers:
        return
    log.warning(
        "evaluation.share: %s of %d rollout worker%s is less than one, and an evaluation holds back one, %.0f %% of "
        'them; use rollout.workers = %d or more, share = %s, or place = "dedicated"',
        toml_text(section.share),
        workers,
        "" if workers == 1 else "s",
        100 * held / workers,
        math.ceil(1 / section.share),
        toml_text(math.ceil(1e4 / workers) / 1e4),
    )
