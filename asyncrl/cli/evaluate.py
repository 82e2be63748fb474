"""`asyncrl evaluate RUN_DIR | MODEL_FOLDER --datasets FILE`: evaluates saved models on data sets, without a run.

FILE is a run file, or a file with only [evaluation] and what else it needs. For a run's folder, all models in models/
and the newest weights are evaluated, except those that have a complete result. Answers to some prompts of each data set
(metrics.samples_per_evaluation) are written to saved_model_samples.jsonl of the run's folder, for
`asyncrl samples RUN_DIR --evaluation`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from asyncrl.audit.run_folder import RecordedRun
from asyncrl.cli import arguments
from asyncrl.config import RunConfig, record
from asyncrl.config.run_file import from_table, override, read_table
from asyncrl.errors import INTERRUPTED, ConfigError, NoHistory

if TYPE_CHECKING:
    from asyncrl.actors.learner.sample_files import SampleFile

_OF_SOLVED: Final = ("pass", "majority")
"""Metrics of answers with at least the reward ``solved_at``."""
_OF_RUN: Final = ("model", "rollout", "run")
"""Sections taken from the run's own settings where FILE has none."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("where", metavar="RUN_DIR|MODEL_FOLDER", type=Path, help="a run's folder or a model folder")
    parser.add_argument(
        "--datasets",
        metavar="FILE",
        type=Path,
        required=True,
        help="TOML with [[evaluation.datasets]], such as a run file",
    )
    parser.add_argument(
        "--only", metavar="NAME", action="append", default=[], help="evaluate only this data set; repeatable"
    )
    parser.add_argument(
        "--answers", metavar="FILE", type=Path, help="write every answer to this new file, one JSON object per prompt"
    )
    parser.add_argument("--again", action="store_true", help="also evaluate models that were evaluated before")
    arguments.add_overrides(parser, "override one key of FILE, such as engine.kind=inprocess; repeatable")
    arguments.add_json(parser)


def run(options: argparse.Namespace) -> int:
    recorded = RecordedRun(options.where)
    is_run = recorded.is_run
    if not is_run and not (options.where / "config.json").exists():
        raise ConfigError(f"{options.where}: is neither a run's folder nor a model's (no config.json)")
    run_config = _settings(options, recorded if is_run else None)
    if sys.stderr.isatty():
        print(f"reading {options.where} and the data sets ...", file=sys.stderr, flush=True)

    from asyncrl.actors.learner.sample_files import SAVED_MODELS_FILE, SampleFile
    from asyncrl.launch.evaluate import Results, SavedModel, evaluate, questions, saved_models  # imports torch
    from asyncrl.messages.evaluation import MOST_PROMPTS  # imports numpy

    models = saved_models(run_config) if is_run else [SavedModel(folder=options.where)]
    if not models:
        raise ConfigError(
            f'{options.where}: has no saved model; set weights.models_every, or evaluation.place = "folder"'
        )
    answers = None
    if is_run:
        most_bytes = run_config.metrics.samples_max_bytes
        answers = SampleFile(options.where, most_bytes=most_bytes, name=SAVED_MODELS_FILE)
    results = Results(options.where)
    digest = questions(run_config, models[-1]) if is_run else ""
    rows, is_complete, is_interrupted = [], True, False
    if options.answers is not None:
        answers = _new_file(options.answers)
        of_all = dataclasses.replace(run_config.metrics, samples_per_evaluation=MOST_PROMPTS)
        run_config = dataclasses.replace(run_config, metrics=of_all)
    try:
        for model in models:
            if is_run and not (options.again or options.answers) and results.has(model, questions=digest):
                print(f"{model.folder}: evaluated already (--again repeats it)", file=sys.stderr)
                continue
            metrics = evaluate(run_config, model, answers=answers)
            if metrics is None:
                print(f"asyncrl evaluate: interrupted; nothing is recorded of {model.folder}", file=sys.stderr)
                is_interrupted = True
                break
            if not metrics["evaluation/complete"]:
                is_complete = False
                again = "; the next call evaluates it again" if is_run else ""
                print(f"asyncrl evaluate: {model.folder}: some prompts have no answer{again}", file=sys.stderr)
            if is_run:
                results.add(model, run_config, metrics, questions=digest)
            rows.append({"model": str(model.folder), "step": model.step, **metrics})
            if not options.json:
                print("\n".join(_lines(model.folder, metrics)), flush=True)
    finally:
        if options.answers is not None and _is_empty(options.answers):
            options.answers.unlink()
    if options.json:
        print(json.dumps(rows))
    if options.answers is not None and answers is not None and answers.num_lost:
        print(f"asyncrl evaluate: {options.answers}: {answers.num_lost} prompts are missing", file=sys.stderr)
        is_complete = False
    return INTERRUPTED if is_interrupted else 0 if is_complete else 1


def _new_file(path: Path) -> SampleFile:
    from asyncrl.actors.learner.sample_files import SampleFile

    try:
        path.open("a" if _is_empty(path) else "x").close()  # an empty one is left of a try that was killed
    except OSError as error:
        raise ConfigError(f"--answers {path}: cannot be made: {error.strerror}; name another file") from None
    return SampleFile(path.parent, name=path.name)


def _is_empty(path: Path) -> bool:
    return path.is_file() and not path.stat().st_size


def _settings(options: argparse.Namespace, recorded: RecordedRun | None) -> RunConfig:
    table = _read(options.datasets)
    if recorded is not None:
        table = _recorded_sections(recorded) | table
        where = options.where.absolute()
        table["run"] = dict(table.get("run", {})) | {"directory": str(where.parent), "name": where.name}
    table["model"] = dict(table.get("model", {})) | {"path": str(options.where)}
    table["data"] = {"path": ""}
    table.pop("checkpoint", None)
    for item in options.overrides:
        override(table, item)
    datasets = table.get("evaluation", {}).get("datasets", [])
    if not datasets:
        raise ConfigError(f"{options.datasets}: names no data set; write [[evaluation.datasets]]")
    if options.only:
        known = [str(one.get("name")) for one in datasets if isinstance(one, dict)]
        for name in options.only:
            if name not in known:
                raise ConfigError(f"--only {name}: {options.datasets} has no such data set; it has {', '.join(known)}")
        table["evaluation"]["datasets"] = [one for one in datasets if one.get("name") in options.only]
    _require_rewards(table, where=options.datasets)
    return from_table(table, where=str(options.datasets))


def _require_rewards(table: Mapping[str, Any], *, where: Path) -> None:
    """Raise ConfigError if a data set has no reward.

    The reward of the run is not taken: its record lacks secrets, and a wrong reward would silently give wrong numbers.
    """
    if "reward" in table:
        return
    for one in table["evaluation"]["datasets"]:
        if isinstance(one, dict) and "reward" not in one:
            raise ConfigError(
                f"{where}: data set {one.get('name')!r} names no reward, and there is no [reward]; "
                "add one, or say --set reward.kind=math"
            )


def _recorded_sections(recorded: RecordedRun) -> dict[str, Any]:
    """Return the recorded settings of the sections ``_OF_RUN``; empty if the record is gone.

    Not rollout.options: their secrets are hidden, and they may name a program, in a folder that may be a stranger's.
    """
    try:
        settings = record.as_table(recorded.newest_settings())
    except NoHistory:
        return {}
    settings["rollout"].pop("options")
    return {name: settings[name] for name in _OF_RUN}


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_table(path)
    except ConfigError as error:
        raise ConfigError(f"--datasets {error}") from None


def _lines(folder: Path, metrics: Mapping[str, float]) -> list[str]:
    whole = "" if metrics["evaluation/complete"] else "  INCOMPLETE"
    lines = [f"{folder}  {metrics['evaluation/seconds']:.1f} s{whole}"]
    for name, value in metrics.items():
        dataset, _, metric = name.removeprefix("evaluation/").partition("/")
        if (
            not name.startswith("evaluation/")
            or not metric
            or "/" in metric
            or metric == "prompts"
            or (metric == "missing" and not value)
        ):
            continue
        low, high = metrics.get(f"{name}/low"), metrics.get(f"{name}/high")
        spread = f"   {low:.4f} to {high:.4f}" if low is not None and high is not None else ""
        lines.append(f"  {dataset:24s} {_in_words(metric):32s} {value:10.4f}{spread}")
    return lines


def _in_words(metric: str) -> str:
    """Return the metric with what it measures: a mean of rewards may be above a share of solved prompts."""
    what = metric.replace("^", "@").partition("@")[0]
    return f"{metric} (reward)" if what == "mean" else f"{metric} (solved)" if what in _OF_SOLVED else metric
