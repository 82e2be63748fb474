"""`asyncrl regrade RUN_DIR`: grades a run's recorded answers again, and writes a branch of the run that was trained so.

A grader had a bug, labels were wrong, a worker was broken. The answers are the costly part, and with
checkpoint.keep_log = true they are on the run's log. So nothing is sampled again: the answers are graded with --reward
or --label-file, groups are left out with --retract, and the branch is trained again from the last checkpoint before the
first difference, up to the run's newest step. `asyncrl run --resume` then goes on with it (audit/branch.py).

The run is only read, and may be up. A command that is interrupted goes on where it stopped when it is given again.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from asyncrl.audit.run_folder import LINEAGE_FILE, Address, RecordedRun
from asyncrl.cli import arguments
from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError
from asyncrl.logs import in_a_line
from asyncrl.os_process import own_command
from asyncrl.policies.audit.entries import present
from asyncrl.policies.groups.predicate import Predicate

if TYPE_CHECKING:
    from asyncrl.audit.branch import Trunk
    from asyncrl.audit.regrade import Change, Grader, Labels, Regraded
    from asyncrl.bus.port import Bus
    from asyncrl.data.prompts import PromptDataset

MOST_STEPS_SHOWN: Final = 20
_KEPT: Final = ("timeout_seconds", "largest", "keep_special_tokens")
"""Keys of [reward] that stay with another kind."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_run_folder(parser)
    parser.add_argument("--reward", default="", metavar="KIND", help="grade with this reward, as in reward.kind")
    parser.add_argument(
        "--label-file",
        type=Path,
        metavar="FILE",
        help='grade with these labels: a corrected copy of the data, or lines such as {"group": 7, "label": "42"} or '
        '{"row": 7, "label": "42"}',
    )
    parser.add_argument("--where", default="", metavar="PREDICATE", help="grade only these, as in 'step > 400'")
    parser.add_argument(
        "--retract", default="", metavar="PREDICATE", help="train without these groups, as in 'worker == \"w3\"'"
    )
    parser.add_argument("--dry-run", action="store_true", help="show what changes, and write no branch")
    parser.add_argument("--parallel", type=int, default=64, metavar="N", help="groups graded at once (default: 64)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="the branch (default: RUN_DIR-regraded)")
    arguments.add_overrides(parser, "override a key of [reward] for the branch, such as reward.options.x=1; repeatable")


def run(options: argparse.Namespace) -> int:
    from asyncrl.audit.branch import holding, trunk_of
    from asyncrl.audit.recorded_groups import FIELDS
    from asyncrl.audit.regrade import alone

    if not (options.reward or options.label_file or options.retract or options.overrides):
        raise ConfigError("regrade: say what to change, with --reward, --label-file, or --retract")
    if options.parallel < 1:
        raise ConfigError(f"--parallel {options.parallel}: must be 1 or more")
    where = Predicate(options.where, fields=FIELDS, where="--where") if options.where else None
    retract = Predicate(options.retract, fields=FIELDS, where="--retract") if options.retract else None
    recorded = RecordedRun(options.run_directory)
    trunk = trunk_of(recorded, present(recorded.history()))
    out = options.out or options.run_directory.with_name(f"{options.run_directory.absolute().name}-regraded")
    if (out / LINEAGE_FILE).exists() or RecordedRun(out).history_file.exists() and not (out / "regrade").exists():
        raise ConfigError(f"--out {out}: already holds a run; name another folder")
    if out.is_dir() and any(out.iterdir()) and not (out / "regrade").exists():  # its weights/ would be removed
        raise ConfigError(f"--out {out}: holds files of something else; name a new folder")
    with alone(out), contextlib.nullcontext() if options.dry_run else holding(trunk, out):
        return _regrade(options, recorded, trunk, out, where=where, retract=retract)


def _regrade(
    options: argparse.Namespace,
    recorded: RecordedRun,
    trunk: Trunk,
    out: Path,
    *,
    where: Predicate | None,
    retract: Predicate | None,
) -> int:
    from asyncrl.audit.branch import first_own_step, require_batch, require_own_states
    from asyncrl.audit.regrade import claim, require_unclaimed

    branch = _settings(recorded, out, reward=options.reward, overrides=options.overrides)
    regrades = bool(options.reward or options.label_file or options.overrides)
    work = _Regrade(
        trunk,
        branch,
        where=where,
        retract=retract,
        label_file=options.label_file,
        regrades=regrades,
        parallel=options.parallel,
        command={"reward": options.reward, "where": options.where, "retract": options.retract}
        | {"label_file": str(options.label_file or ""), "set": list(options.overrides)},
    )
    if not options.dry_run:
        require_unclaimed(out, work.command)
    token = arguments.bus_token()
    old = recorded.newest_settings()
    began = time.monotonic()
    own = 0 if options.dry_run else first_own_step(trunk, out)
    require = functools.partial(require_own_states, trunk, first=own)
    regraded = recorded.on_bus(old, functools.partial(work.grade, old, require=require), token=token)
    seconds = time.monotonic() - began
    trained = trunk.step
    first = regraded.first_step(trained=trained)
    found: dict[str, Any] = _as_json(regraded, first=first, trained=trained) | {"grading_seconds": seconds}
    if not options.json:
        _print_changes(regraded, first=first, trained=trained, retracts=retract is not None)
    if options.dry_run or not regraded.changed:
        if not regraded.changed:
            work.grades_path.unlink(missing_ok=True)
        print(json.dumps(found) if options.json else "no branch is written")
        return 0
    if regraded.all_failed:  # before the folder is another command's
        raise ConfigError(f"regrade: none of the {found['groups']} groups can be graded; the first: {found['error']}")
    require_batch(trunk, regraded, out, first=first)
    claim(out, work.command)
    with _server(branch, token=token) as address:
        write = functools.partial(work.write, address, regraded, is_quiet=options.json)
        state = recorded.on_bus(old, write, token=token)
    found |= {"branch": str(out), "step": state}
    settings = [f"run.directory={branch.run.directory}"] if options.out else []
    settings += [f"run.name={branch.run.name}", *([f"reward.kind={options.reward}"] if options.reward else [])]
    again = "".join(f" --set {shlex.quote(item)}" for item in [*settings, *options.overrides])
    if options.json:
        print(json.dumps(found))
    else:
        print(f"branch {out}: at step {state}; go on with: {own_command()} run RUN.toml{again} --resume")
    return 0


def _settings(recorded: RecordedRun, out: Path, *, reward: str, overrides: Sequence[str]) -> RunConfig:
    """Return the branch's run file. Raises ConfigError."""
    from asyncrl import config
    from asyncrl.config import record, tables
    from asyncrl.config.reward import RewardSection

    run = recorded.newest_settings()
    table: dict[str, Any] = {"reward": record.as_table(run)["reward"]}
    if reward:
        table["reward"] = {key: table["reward"][key] for key in _KEPT if key in table["reward"]} | {"kind": reward}
    for item in overrides:
        if not item.startswith("reward."):
            raise ConfigError(f"--set {item}: only keys of [reward] change the grades; set others when the branch runs")
        config.override(table, item)
    tables_of = [table["reward"], *table["reward"].get("parts", {}).values()]
    if any(one.get("options", {}).get("server") for one in tables_of):
        raise ConfigError(
            "reward.options.server: the servers of a run are not up here; name one that is with --set "
            "reward.options.url=http://HOST:PORT --set reward.options.server=''"
        )
    place = dataclasses.replace(run.run, name=out.absolute().name, directory=str(out.absolute().parent))
    return dataclasses.replace(run, run=place, reward=tables.build(RewardSection, table["reward"], "reward"))


@contextlib.contextmanager
def _server(run: RunConfig, *, token: str) -> Iterator[Address]:
    """Yield the address of the branch's bus: bus.url, or a server on its own store."""
    from asyncrl.adapters import registry

    if run.bus.url:
        yield Address(url=run.bus.url, token=token)
        return
    server = registry.bus_class(run).server(run, directory=run.run_directory, host="127.0.0.1")
    if server is None:
        raise ConfigError(f'bus.kind = "{run.bus.kind}": a branch of such a run has no log that others can read')
    server.start()
    try:
        yield Address(url=server.url, token=server.token)
    finally:
        server.stop()


class _Regrade:
    def __init__(
        self,
        trunk: Trunk,
        branch: RunConfig,
        *,
        where: Predicate | None,
        retract: Predicate | None,
        label_file: Path | None,
        regrades: bool,
        parallel: int,
        command: Mapping[str, Any],
    ) -> None:
        from asyncrl.audit.recorded_groups import PromptFinder
        from asyncrl.launch.assembly.data import open_rows

        self._trunk, self._branch = trunk, branch
        self._where, self._retract, self._parallel = where, retract, parallel
        self._regrades, self._label_file, self._command = regrades, label_file, command
        self._graded_by = graded_by(branch, label_file=label_file)
        self._rows = open_rows(branch)
        self._finder = PromptFinder(self._rows, branch, has_overlong=self._rows_may_be_skipped(trunk))

    @staticmethod
    def _rows_may_be_skipped(trunk: Trunk) -> bool:
        """Whether a row may have been too long: unknown of the rows behind the newest checkpoint."""
        return trunk.prompts.overlong > 0 or trunk.next_group_id > trunk.prompts.next_group_id

    async def grade(self, old: RunConfig, bus: Bus, *, require: Callable[[int], None]) -> Regraded:
        from asyncrl.audit.regrade import regrade
        from asyncrl.messages.topics import TRAJECTORIES

        grader = self._grader(old) if self._regrades else None
        try:
            return await regrade(
                bus,
                self._trunk.history,
                directory=self._trunk.recorded.directory,
                finder=self._finder,
                grader=grader,
                where=self._where,
                retract=self._retract,
                parallel=self._parallel,
                require=require,
                say=_Progress(await bus.depth(TRAJECTORIES)),
            )
        finally:
            if grader is not None:
                await grader.close()

    async def write(self, own: Address, regraded: Regraded, source: Bus, *, is_quiet: bool) -> int:
        """Write the branch, and return its step.  own: its bus;  source: the run's"""
        from asyncrl.adapters import registry
        from asyncrl.audit.branch import copy_log, write_branch
        from asyncrl.messages.topics import PROGRESS

        there = dataclasses.replace(self._branch, bus=dataclasses.replace(self._branch.bus, url=own.url))
        target = await registry.connect(there, token=own.token)
        try:
            if await target.states(PROGRESS):
                raise ConfigError(f"--out: a run {self._branch.run.name!r} is on the bus already; name another folder")
            sequences = await copy_log(source, target, regraded)
            state = await write_branch(
                self._trunk,
                regraded,
                run=self._branch,
                bus=target,
                sequences=sequences,
                position=self._finder.position,
                lineage={
                    **self.command,
                    "groups_changed": sum(one.is_changed for one in regraded.changes),
                    "groups_retracted": sorted(regraded.retracted),
                },
                say=lambda step, metrics: (
                    None
                    if is_quiet
                    else print(
                        f"step {step}  reward {metrics['reward/mean']:.4g}  loss {metrics['loss']:.4g}", flush=True
                    )
                ),
            )
        finally:
            await target.close()
        return state.step

    @property
    def grades_path(self) -> Path:
        from asyncrl.audit.regrade import grades_path

        return grades_path(self._branch.run_directory, graded_by=self._graded_by)

    @property
    def command(self) -> dict[str, Any]:
        """What the branch is made with, for its lineage."""
        return {"command": self._command, "graded_by": self._graded_by}

    def _grader(self, old: RunConfig) -> Grader:
        from asyncrl.adapters import registry
        from asyncrl.audit.regrade import Grader, GradesFile
        from asyncrl.data.tokenizer import load_tokenizer

        labels = None if self._label_file is None else _labels(self._label_file, self._branch, self._rows)
        reward = registry.load_reward(self._branch)
        reward.check_machine()
        tokenizer = load_tokenizer(Path(old.model.path), trusts_code=old.model.trust_remote_code)
        grades = GradesFile(self.grades_path)
        return Grader(old, reward=reward, tokenizer=tokenizer, finder=self._finder, grades=grades, labels=labels)


def graded_by(run: RunConfig, *, label_file: Path | None) -> str:
    """Return a digest of everything that decides a grade, as far as it can be seen. Raises ConfigError."""
    from asyncrl.config.record import as_table
    from asyncrl.launch.checks.signal_files import digest_code

    code = [digest_code(kind) for kind in run.reward.kinds]
    try:
        labels = "" if label_file is None else hashlib.sha256(label_file.read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(f"--label-file {label_file}: cannot be read: {error.strerror}") from None
    return hashlib.sha256(json.dumps([as_table(run)["reward"], code, labels], sort_keys=True).encode()).hexdigest()


class _Progress:
    """Says on stderr, once a second, how many groups are graded."""

    def __init__(self, most: int) -> None:
        self._most, self._began, self._said = most, time.monotonic(), time.monotonic()

    def __call__(self, done: int) -> None:
        now = time.monotonic()
        if now - self._said >= 1:
            self._said = now
            rate = done / (now - self._began)
            print(f"graded {done:,} groups of {self._most:,} on the log ({rate:.0f}/s)", file=sys.stderr, flush=True)


def _labels(path: Path, run: RunConfig, rows: PromptDataset) -> Labels:
    """Return the labels of a file: lines by group or row, or a copy of the data. Raises ConfigError."""
    from asyncrl.launch.assembly.data import open_rows

    try:
        with path.open() as file:
            head = json.loads(file.readline()) if path.suffix != ".parquet" else {}
            lines = [json.loads(line) for line in itertools.chain([json.dumps(head)], file) if line.strip()]
    except OSError as error:
        raise ConfigError(f"--label-file {path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--label-file {path}: is not JSON lines: {error}") from None
    if isinstance(head, dict) and head.keys() & {"group", "row"} and run.data.prompt_key not in head:
        named: dict[tuple[str, int], Any] = {}
        for number, line in enumerate(lines, 1):
            key = next((key for key in ("group", "row") if isinstance(line, dict) and type(line.get(key)) is int), "")
            if not key or "label" not in line:
                raise ConfigError(f'--label-file {path}: line {number} must be like {{"group": 7, "label": "42"}}')
            named[key, line[key]] = line["label"]
        return lambda group_id, position, row: named.get(("group", group_id), named.get(("row", position), row.label))
    section = dataclasses.replace(run.data, path=str(path), files=(), source="", shuffle=False, epochs=1)
    corrected = open_rows(dataclasses.replace(run, data=section))
    found = (corrected.at(position) for position in range(corrected.num_rows))
    by_tokens = {row.tokens.tobytes(): row.label for row in found if row is not None}
    return lambda group_id, position, row: by_tokens.get(row.tokens.tobytes(), row.label)


# -- what a person sees ------------------------------------------------------------------------------------------------


def _rows(changes: Iterable[Change], *, by: str) -> dict[Any, dict[str, Any]]:
    """Return the changes summed up by an attribute."""
    found: dict[Any, dict[str, Any]] = {}
    of: dict[Any, list[Change]] = {}
    for one in changes:
        of.setdefault(getattr(one, by), []).append(one)
    for key, ones in sorted(of.items()):
        new = [one.new for one in ones if not math.isnan(one.new)]
        found[key] = {
            "groups": len(ones),
            "changed": sum(one.is_changed for one in ones),
            "other_advantages": sum(one.has_other_advantages for one in ones),
            "failed": len(ones) - len(new),
            "old": statistics.fmean(one.old for one in ones),
            "new": statistics.fmean(new) if new else None,
        }
    return found


def _as_json(regraded: Regraded, *, first: int, trained: int) -> dict[str, Any]:
    return {
        "groups": len(regraded.changes),
        "changed": sum(one.is_changed for one in regraded.changes),
        "other_advantages": sum(one.has_other_advantages for one in regraded.changes),
        "failed": sum(math.isnan(one.new) for one in regraded.changes),
        "error": regraded.first_error,
        "retracted": len(regraded.retracted),
        "first_step": first if first <= trained else None,
        "tasks": _rows(regraded.changes, by="task"),
        "steps": _rows((one for one in regraded.changes if one.fate == "trained"), by="step"),
    }


def _print_changes(regraded: Regraded, *, first: int, trained: int, retracts: bool) -> None:
    if regraded.changes:
        print(f"{'task':>14}  {'groups':>7} {'changed':>8} {'advantages':>10}  {'reward':>8} {'now':>8}")
        for task, row in _rows(regraded.changes, by="task").items():
            _print_row(task or "-", row)
        steps = _rows((one for one in regraded.changes if one.fate == "trained"), by="step")
        others = [(step, row) for step, row in steps.items() if row["changed"]]
        if others:
            print("          step")
        for step, row in others[:MOST_STEPS_SHOWN]:
            _print_row(str(step), row)
        if len(others) > MOST_STEPS_SHOWN:
            print(f"{'...':>14}  {len(others) - MOST_STEPS_SHOWN} more steps; --json has all")
    said = _as_json(regraded, first=first, trained=trained)
    parts = [f"{said['changed']} of {said['groups']} groups have other rewards, {said['other_advantages']} other "]
    parts[0] += "advantages"
    parts += [f"{said['failed']} cannot be graded, the first: {in_a_line(said['error'])}"] if said["failed"] else []
    parts += [f"{said['retracted']} retracted"] if retracts else []
    parts.append(f"the first step that differs is {first}" if first <= trained else f"no step up to {trained} differs")
    print("; ".join(parts))


def _print_row(name: str, row: Mapping[str, Any]) -> None:
    new = "-" if row["new"] is None else f"{row['new']:.4g}"
    print(
        f"{name[-14:]:>14}  {row['groups']:7d} {row['changed']:8d} {row['other_advantages']:10d}"
        f"  {row['old']:8.4g} {new:>8}"
    )
