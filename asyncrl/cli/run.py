"""`asyncrl run RUN.toml`: starts a whole run on this machine or on a cluster: bus, learner and rollout workers."""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex

from asyncrl.adapters import registry
from asyncrl.audit.run_folder import RecordedRun, newest_model
from asyncrl.cli import arguments
from asyncrl.config import RunConfig
from asyncrl.config.toml_text import toml_text
from asyncrl.errors import ConfigError
from asyncrl.launch.checks.run_file import check
from asyncrl.launch.processes.launch import launch
from asyncrl.launch.processes.process_manager import Outcome
from asyncrl.logs import print_line
from asyncrl.os_process import own_command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_run_file(parser)
    parser.add_argument(
        "--launcher",
        default="",
        metavar="KIND",
        help="what starts the processes: local, ray or package.module:Class (launcher.kind of the run file)",
    )
    parser.add_argument("--resume", action="store_true", help="continue from the run's last checkpoint")


def run(options: argparse.Namespace) -> int:
    if options.launcher:
        options.overrides.append(f"launcher.kind={toml_text(options.launcher)}")
    run_config = arguments.load(options)
    check(run_config)
    outcome = asyncio.run(
        launch(
            run_config,
            run_file=options.run_file,
            overrides=options.overrides,
            resume=options.resume,
            token=arguments.bus_token(run_config),
            handles_signals=True,
        )
    )
    if outcome.exit_code == 0 and (line := _best_model(run_config)):
        print_line(line)
    if line := _last_line(run_config, options, outcome):
        print_line(line)
    return outcome.exit_code


def _best_model(run_config: RunConfig) -> str:
    """Describe the best model: folder, metric and step.

    Empty without ``checkpoint.best``, or if no result is recorded.
    """
    metric, folder = run_config.checkpoint.best, run_config.run_directory / "best"
    try:
        found = json.loads((folder / "evaluation.json").read_text())
        step, value = int(found["step"]), float(found["value"])
        is_its_metric = found["metric"] == metric
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""
    return f"best model in {folder}: {metric} {value:.3f} at step {step}" if metric and is_its_metric else ""


def _last_line(run_config: RunConfig, options: argparse.Namespace, outcome: Outcome) -> str:
    """Say where the model is, or how to continue the run. Empty if there is nothing to continue."""
    if outcome.exit_code == 0:
        model = newest_model(run_config)
        return f"model in {model}" if model is not None else ""
    is_kept = registry.bus_class(run_config).is_shared and RecordedRun(run_config.run_directory).history_file.exists()
    if not is_kept or outcome.exit_code == ConfigError.exit_code:
        return ""
    overrides = [word for item in options.overrides for word in ("--set", item)]
    return f"continue with: {own_command()} {shlex.join(['run', str(options.run_file), *overrides, '--resume'])}"
