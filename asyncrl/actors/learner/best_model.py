"""Keeps the model with the best evaluation result: checkpoint.best. Blocking; call it from a thread."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from asyncrl.durable_files import link_or_copy
from asyncrl.policies.staleness.staleness import ResumePoints, is_rolled_back

RESULT_FILE: Final = "evaluation.json"

log = logging.getLogger("asyncrl.evaluation")


class BestModel:
    """A Hugging Face folder, replaced as a whole when a better model is found; RESULT_FILE in it has the result."""

    def __init__(self, folder: Path, *, metric: str, resume_points: ResumePoints | None = None) -> None:
        """
        metric         DATASET/METRIC
        resume_points  of the learner: a best model of a rolled-back version is replaced by the next model, however good
        """
        self._folder = folder
        self._metric = metric
        if not folder.exists() and self._beside("old").exists():  # an earlier incarnation ended between the renames
            self._beside("old").rename(folder)
        self._best = _value(folder / RESULT_FILE, metric, resume_points or {})

    def keep_if_better(self, model: Path, metrics: Mapping[str, float], *, version: tuple[int, int]) -> bool:
        """Keep ``model`` if it is better than the best so far.  version: (incarnation, policy version).  Raises
        OSError."""
        value = metrics.get(f"evaluation/{self._metric}")
        if value is None or (self._best is not None and value <= self._best):
            return False
        fresh, old = self._beside("new"), self._beside("old")
        for left in (fresh, old):
            shutil.rmtree(left, ignore_errors=True)
        shutil.copytree(model, fresh, copy_function=link_or_copy)
        result = {"step": version[1], "incarnation": version[0], "metric": self._metric, "value": value}
        (fresh / RESULT_FILE).write_text(json.dumps(result | {"metrics": dict(metrics)}, indent=1))
        if self._folder.exists():
            self._folder.rename(old)
        fresh.rename(self._folder)
        shutil.rmtree(old, ignore_errors=True)
        log.info("the best model so far is of step %d: %s = %.4f", version[1], self._metric, value)
        self._best = value
        return True

    def _beside(self, what: str) -> Path:
        return self._folder.with_name(f".{self._folder.name}-{what}")


def _value(file: Path, metric: str, resume_points: ResumePoints) -> float | None:
    """Return the value of the kept best model; None if none is kept, by another metric, or of a rolled-back version."""
    try:
        found = json.loads(file.read_text())
        version, value = (int(found["incarnation"]), int(found["step"])), float(found["value"])
        return value if found["metric"] == metric and not is_rolled_back(version, resume_points) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
