"""`asyncrl audit RUN_DIR`: accounts for every prompt group of a run that is finished, stopped, killed or running.

policies/audit/accounting.py describes how the numbers follow from these sources; ``Account`` describes each number.

history.jsonl   a line for each group that was trained, dropped, failed or filtered, and for each start of the learner
checkpoints/    newest checkpoint: ledgers of groups and log records, the prompt position, outstanding groups
the bus         unfinished prompts, and the trajectory log with the versions that sampled each token. A running run's
                bus is read directly; otherwise a nats-server is started on the run's store, or bus.url is read
metrics.jsonl   staleness/max of each step

The run may be running: sources are read in the order in which a group passes them (prompts, log, checkpoint, history),
so a group in transit is seen at least once.

Parts of the folder that cannot be read are reported in one line each. Groups that they may hide do not count as lost:
groups that are done according to the checkpoint but have no line in a damaged history are "unrecorded".

Exit code 0 if lost = duplicated = staleness_violations = unrecorded = 0, otherwise 1; 2 if the folder has no run or its
settings cannot be read.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from asyncrl.audit.account import account_of
from asyncrl.cli import arguments
from asyncrl.logs import printable
from asyncrl.policies.audit.accounting import Account

SHOWN_PROBLEMS = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_run_folder(parser)
    arguments.add_overrides(parser, "override one key of the run, such as bus.url; repeatable")


def run(options: argparse.Namespace) -> int:
    token = arguments.bus_token()
    return audit(options.run_directory, token=token, overrides=options.overrides, as_json=options.json)


def audit(directory: Path, *, token: str = "", overrides: Sequence[str] = (), as_json: bool = False) -> int:
    """Print the account of the run in ``directory`` and return the exit code: 0 if it is clean.

    token  token of the server at bus.url

    Raises ConfigError for a folder that holds no run.
    """
    made = account_of(directory, token=token, overrides=overrides)
    print(json.dumps(made.as_json()) if as_json else table(made, directory))
    return 0 if made.is_clean else 1


def table(made: Account, directory: Path) -> str:
    """Return the account as text."""
    rows = [
        ("prompts", made.prompts, "prompt groups published"),
        ("published", made.published, "were answered by a worker"),
        ("trained", made.trained, f"by {made.steps:,} steps"),
        ("dropped", made.dropped, "too old to train"),
        ("failed", made.failed, "could not be made"),
        ("filtered", made.filtered, "nothing to learn from"),
        ("pending", made.pending, "not done yet"),
        ("retrained", made.retrained, "trained once more, behind a checkpoint that a learner fell back to"),
        ("foreign", made.foreign, "records on the log of groups that this run never published"),
        ("lost", made.lost, ""),
        ("unrecorded", made.unrecorded, "done, but how is in a damaged part of the record"),
        ("duplicated", made.duplicated, ""),
        ("max_staleness", made.max_staleness, f"versions, of {made.bound} allowed"),
        ("staleness_violations", made.staleness_violations, ""),
        ("incarnations", made.incarnations, "starts of the learner"),
        ("evaluations", made.evaluations, f"{made.evaluations_incomplete:,} of them incomplete"),
        (
            "evaluation_answers",
            made.evaluation_answers,
            f"of the newest, each to one prompt; {made.evaluation_mixed:,} mixed, in no result",
        ),
        ("evaluation_problems", made.evaluation_problems, ""),
    ]
    lines = [f"{directory}: every prompt group and what became of it"]
    lines += [f"  {name:22s}{count:>9,}  {meaning}".rstrip() for name, count, meaning in rows]
    lines.append(f"staleness recomputed from the log for {made.on_log:,} groups, as recorded for the others")
    lines.append(f"compared with metrics.jsonl for {made.with_metrics:,} of {made.steps:,} steps")
    shown = made.problems[:SHOWN_PROBLEMS]
    lines += [f"  {printable(problem)}" for problem in shown]
    if len(made.problems) > len(shown):
        lines.append(f"  and {len(made.problems) - len(shown)} more")
    lines += [f"  {sentence}" for sentence in made.damage]
    if made.bus_not_asked:
        lines.append(f"bus: not asked ({made.bus_not_asked})")
    verdict = "RECORD DAMAGED, and nothing else is wrong" if made.has_no_fault else "NOT CLEAN"
    fine = "clean" if made.incarnations else "nothing is recorded yet: no learner has begun"
    lines.append(fine if made.is_clean else verdict)
    return "\n".join(lines)
