"""Logs metrics to Weights & Biases. The only module that imports wandb.

Every metric of the schema is a panel, grouped by the part before the slash. Histograms (staleness, lengths) are drawn
over steps. Evaluation results are drawn over the step that made the evaluated version (``evaluation/step``). Recorded
groups are tables with one row per answer: ``samples``, and ``evaluation/DATASET/samples`` for each evaluation. Alarms
are alerts. WANDB_MODE=offline and the other WANDB_ variables work as usual.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from asyncrl.errors import ConfigError
from asyncrl.metrics.samples_text import COLUMNS, EVALUATION_COLUMNS, evaluation_rows, rows
from asyncrl.policies.groups.sample import EVALUATED, GroupSample
from asyncrl.policies.metric import Histogram, Metric

TABLE_ROWS: Final = 64
"""Answers to collect before they are logged as a table. Each table is a file to upload, so not every step logs one."""
REACH_SECONDS: Final = 5.0
INIT_SECONDS: Final = 20.0
"""How long W&B is asked for a run. Meanwhile rows wait."""
LONGEST_REASON: Final = 300
_REMEDY: Final = "run `wandb login`, or set WANDB_API_KEY, or WANDB_MODE=offline"
EVALUATION_STEP: Final = "evaluation/step"
"""Axis of the evaluation metrics."""

log = logging.getLogger("asyncrl.learner")


def checked_wandb() -> Any:
    """Return the package. Raises ConfigError if it is not installed, or if a WANDB_ variable has an invalid value."""
    try:
        import wandb
    except ImportError:
        raise ConfigError("metrics.wandb: wandb is not installed; pip install 'asyncrl[wandb]'") from None
    try:
        wandb.Settings().update_from_env_vars(os.environ)
    except ValueError as error:
        # the pydantic error between its headline and its link
        wrong = " ".join(map(str.strip, str(error).splitlines()[1:3]))
        raise ConfigError(f"metrics.wandb: a WANDB_ variable is wrong: {wrong}") from None
    return wandb


def check_login() -> None:
    """Raise ConfigError if W&B would be reached, and no login is there. Nothing is asked of W&B itself."""
    wandb = checked_wandb()
    if wandb.setup().settings.mode not in ("online", "shared"):
        return
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # it says where it found the key
            has_login = wandb.login(prompt=False, verify=False)
        problem = "this machine has no login"
    except Exception as error:  # a key of a wrong form, or an unusable address
        has_login, problem = False, " ".join(str(error).split())
    if not has_login:
        raise ConfigError(f"metrics.wandb: {problem}; {_REMEDY}")


def _reach(settings: Any) -> None:
    """Raise OSError if nothing answers at W&B's address. The client itself would ask again and again for minutes."""
    if settings.mode not in ("online", "shared"):
        return
    try:
        urllib.request.urlopen(settings.base_url, timeout=REACH_SECONDS).close()
    except urllib.error.HTTPError:  # an answer
        pass
    except urllib.error.URLError as error:
        if not isinstance(error.reason, ssl.SSLError):  # the client has certificates of its own
            raise OSError(f"{settings.base_url}: {error.reason}") from error


class WandB:
    """One W&B run per learner. A resumed learner continues the same W&B run, whose id is kept in the run's folder.

    W&B is asked with the first call. If it cannot be reached then, the rows are kept in the run's folder, from where
    `wandb sync` uploads them.
    """

    def __init__(self, *, project: str, name: str, directory: Path, config: Mapping[str, Any], resume: bool) -> None:
        self._wandb = checked_wandb()
        self._answers: list[list[Any]] = []
        self._evaluated: dict[str, list[list[Any]]] = {}  # by data set, of the evaluation in progress
        directory.mkdir(parents=True, exist_ok=True)
        self._directory, self._kept = directory, directory / "wandb-id"
        known = self._kept.read_text() if resume and self._kept.exists() else None
        self._settings: dict[str, Any] = {
            "project": project,
            "name": name,
            "id": known,
            "resume": "allow" if known else None,
            "dir": str(directory),
            "config": dict(config),
        }
        self._made: Any = None

    @property
    def _run(self) -> Any:
        if self._made is not None:
            return self._made
        more = {} if "WANDB_INIT_TIMEOUT" in os.environ else {"init_timeout": INIT_SECONDS}
        try:
            _reach(self._wandb.setup().settings)
            made = self._wandb.init(**self._settings, settings=self._wandb.Settings(silent=True, **more))
        except Exception as error:  # unreachable, refused, no login: the client raises errors of many kinds
            made = self._wandb.init(**self._settings, mode="offline", settings=self._wandb.Settings(silent=True))
            log.error(
                "metrics.wandb: W&B gets nothing now (%s); %s. The run goes on, its rows are kept: "
                "`wandb sync %s/wandb/offline-run-*%s` uploads them",
                " ".join(str(error).split())[:LONGEST_REASON],
                _REMEDY,
                self._directory,
                made.id,
            )
        made.define_metric("step", hidden=True)
        made.define_metric("*", step_metric="step")
        made.define_metric(EVALUATION_STEP, hidden=True)
        made.define_metric("evaluation/*", step_metric=EVALUATION_STEP)
        self._made = made
        self._kept.write_text(made.id)
        return made

    def write(self, step: int, metrics: Mapping[str, Metric]) -> None:
        row = {name: self._value(value) for name, value in metrics.items()}
        is_evaluation = any(name.startswith("evaluation/") for name in metrics)
        self._run.log({"step": step} | row | (self._evaluation(step) if is_evaluation else {}))

    def write_samples(self, step: int, samples: Sequence[GroupSample]) -> None:
        for sample in samples:
            if sample.fate == EVALUATED:
                self._evaluated.setdefault(sample.dataset, []).extend(evaluation_rows(sample))
            else:
                self._answers += rows(sample)
        if len(self._answers) >= TABLE_ROWS:
            self._log_answers(step)

    def alarm(self, step: int, name: str, text: str) -> None:
        self._run.alert(title=f"{name} at step {step}", text=text, level="WARN")

    def _log_answers(self, step: int) -> None:
        table = self._wandb.Table(columns=list(COLUMNS), data=self._answers)
        self._answers = []
        self._run.log({"step": step, "samples": table})

    def _evaluation(self, step: int) -> dict[str, Any]:
        """Return the position on the evaluation axis and the tables of answers."""
        tables = {
            f"evaluation/{dataset}/samples": self._wandb.Table(columns=list(EVALUATION_COLUMNS), data=answers)
            for dataset, answers in self._evaluated.items()
        }
        self._evaluated = {}
        return {EVALUATION_STEP: step} | tables

    def _value(self, value: Metric) -> Any:
        if not isinstance(value, Histogram):
            return value
        return self._wandb.Histogram(np_histogram=(list(value.counts), list(value.edges)))

    def close(self) -> None:
        if self._answers:
            self._log_answers(max(row[0] for row in self._answers))
        if self._made is not None:
            self._made.finish()
