"""`asyncrl regrade`: the branch of a run that was graded wrong, and what becomes of it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import shutil
import uuid
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from asyncrl.actors.base import HeartbeatSender
from asyncrl.actors.rollout.group_maker import with_reward
from asyncrl.actors.supervisor import supervise
from asyncrl.adapters import registry
from asyncrl.audit.account import account_of, account_with
from asyncrl.audit.branch import copy_log, lineage_of, trunk_of, write_branch
from asyncrl.audit.recorded_groups import FIELDS, PromptFinder
from asyncrl.audit.regrade import Grade, Grader, GradesFile, Regraded, alone, claim, grades_path, regrade
from asyncrl.audit.run_folder import RecordedRun, log_records
from asyncrl.bus.jetstream.bus import JetStreamBus
from asyncrl.bus.nats_server.server import EmbeddedServer
from asyncrl.bus.port import Bus
from asyncrl.cli.regrade import graded_by
from asyncrl.config import RunConfig
from asyncrl.data.tokenizer import load_tokenizer
from asyncrl.errors import ConfigError
from asyncrl.launch.assembly.build_learner import build_learner
from asyncrl.launch.assembly.build_worker import build_worker
from asyncrl.launch.assembly.data import open_rows
from asyncrl.launch.checks.resume_checks import check_settings
from asyncrl.messages import PromptGroup, TrajectoryGroup
from asyncrl.messages.topics import PROGRESS, PROMPTS, TRAJECTORIES, answer_key
from asyncrl.os_process import own_command
from asyncrl.policies.audit.entries import HistoryEntry, present
from asyncrl.policies.groups.predicate import Predicate
from asyncrl.rewards.completions import CompletionReader
from asyncrl.rewards.port import Reward, Sample
from asyncrl.version import VERSION
from tests.harness.audits import audited
from tests.harness.command import asyncrl
from tests.harness.groups import group as a_group
from tests.harness.histories import forge
from tests.harness.learning import is_same, memory_bus, train, weights
from tests.integration.test_audit import train_there
from tests.integration.undo import rewards
from tests.integration.undo.runs import HERE, there

Buses = Callable[[str], Awaitable[Bus]]


@pytest.fixture(params=["memory", "jetstream"])
def buses(
    request: pytest.FixtureRequest, nats_server: EmbeddedServer, connect: Callable[..., Awaitable[JetStreamBus]]
) -> Buses:
    """``await buses(name)``: the bus of the run of that name."""
    made: dict[str, Bus] = {}
    unique = uuid.uuid4().hex[:8]

    async def open_one(name: str) -> Bus:
        if name not in made:
            if request.param == "memory":
                made[name] = memory_bus()
            else:
                made[name] = await connect(nats_server, run=f"{name}-{unique}", max_prompts=256)
        return made[name]

    return open_one


async def train_with_a_killed_worker(run: RunConfig, bus: Bus) -> None:
    """Two workers; one is killed after the first step."""
    learner, helpers = await build_learner(run, bus=bus, resume=False)
    async with asyncio.TaskGroup() as group:
        tasks = []
        for number in range(2):
            worker, *beside = await build_worker(run, bus=bus, name=f"w{number}")
            tasks.append(group.create_task(supervise(worker, *beside, HeartbeatSender(worker))))

        async def kill() -> None:
            async with bus.watch(PROGRESS) as states:
                async for progress in states:
                    if progress.step:
                        tasks[1].cancel()
                        return

        group.create_task(kill())
        await supervise(learner, *helpers, HeartbeatSender(learner))


async def groups_of(bus: Bus) -> dict[int, TrajectoryGroup]:
    """The groups on a log by id."""
    async with contextlib.aclosing(log_records(bus, TRAJECTORIES)) as records:
        return {one.message.group_id: one.message async for one in records if one.message is not None}


async def play(bus: Bus, run: RunConfig, groups: Mapping[int, TrajectoryGroup]) -> None:
    """Answer prompts with recorded samples and the right rewards."""
    read = CompletionReader(load_tokenizer(Path(run.model.path))).read

    def graded(group: TrajectoryGroup, prompt: PromptGroup) -> TrajectoryGroup:
        parts: list[Any] = []
        for rollout in group.rollouts:
            sample = Sample(
                prompt=prompt.prompt,
                completion=read(rollout[-1])[1],
                label=prompt.label,
                metadata={},
                trajectory=rollout[-1],
                prompt_tokens=prompt.prompt_tokens,
            )
            parts += with_reward(rollout, Reward(value=rewards.right(sample)))
        return dataclasses.replace(group, trajectories=tuple(parts))

    async with bus.consume(PROMPTS) as prompts, bus.watch(PROGRESS) as states:
        progress = await anext(states)
        async for delivery in prompts:
            prompt = delivery.message
            assert prompt is not None
            if (group := groups.get(prompt.group_id)) is None:
                continue  # the recorded run ended before it was answered
            newest = max(span.policy_version for one in group.trajectories for span in one.version_spans)
            while progress.policy_version < newest:  # the learner refuses tokens of versions to come
                progress = await anext(states)
            key = answer_key(group.group_id, worker=group.worker, ticket=prompt.ticket)
            await bus.publish(TRAJECTORIES, graded(group, prompt), key=key)
            await delivery.ack()


async def regrade_here(
    run: RunConfig, source: Bus, *, branch: RunConfig, target: Bus, where: str = "", retract: str = ""
) -> Regraded:
    """What the command does, on buses of this process."""
    recorded = RecordedRun(run.run_directory)
    trunk = trunk_of(recorded, present(recorded.history()))
    finder = PromptFinder(open_rows(branch), branch, has_overlong=False)
    grader = Grader(
        run,
        reward=registry.load_reward(branch),
        tokenizer=load_tokenizer(Path(run.model.path)),
        finder=finder,
        grades=GradesFile(grades_path(branch.run_directory, graded_by="test")),
    )
    found = await regrade(
        source,
        trunk.history,
        directory=recorded.directory,
        finder=finder,
        grader=grader,
        where=Predicate(where, fields=FIELDS, where="--where") if where else None,
        retract=Predicate(retract, fields=FIELDS, where="--retract") if retract else None,
    )
    await grader.close()
    sequences = await copy_log(source, target, found)
    await write_branch(trunk, found, run=branch, bus=target, sequences=sequences, position=finder.position, lineage={})
    return found


async def test_the_branch_has_the_weights_of_a_run_that_had_the_right_rewards(
    buses: Buses, task: Path, tmp_path: Path
) -> None:
    """To the last bit, though a worker was killed. Then it goes on with new samples, and the run is as it was."""
    run = there(task, tmp_path, f"reward.kind={HERE}:wrong")
    await train_with_a_killed_worker(run, await buses("wrong"))
    groups = await groups_of(await buses("wrong"))
    assert {group.engine for group in groups.values() if not group.error} == {f"inprocess {VERSION}"}
    before = {path: path.read_bytes() for path in run.run_directory.rglob("*") if path.is_file()}

    right = there(task, tmp_path, f"reward.kind={HERE}:right", "run.name=right")
    bus = await buses("right")
    learner, helpers = await build_learner(right, bus=bus, resume=False)
    async with asyncio.TaskGroup() as group:
        player = group.create_task(play(bus, right, groups))
        await supervise(learner, *helpers, HeartbeatSender(learner))
        player.cancel()

    branch = there(task, tmp_path, f"reward.kind={HERE}:right", "run.name=branch")
    newest = run.run_directory / "checkpoints" / "step-00000004"
    newest.rename(newest.with_name("away"))  # as of a run that is up, and two steps behind its checkpoint
    found = await regrade_here(run, await buses("wrong"), branch=branch, target=await buses("branch"))
    newest.with_name("away").rename(newest)
    assert 0 < len(found.changed) < len(found.changes)
    assert is_same(weights(branch, 4), weights(right, 4))
    assert not is_same(weights(branch, 4), weights(run, 4))
    assert {path: path.read_bytes() for path in run.run_directory.rglob("*") if path.is_file()} == before

    longer = there(task, tmp_path, f"reward.kind={HERE}:right", "run.name=branch", "run.steps=6")
    rows = await train(longer, await buses("branch"), resume=True)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    for folder, name, steps in ((longer, "branch", 6), (run, "wrong", 4)):
        account = await account_with(RecordedRun(folder.run_directory), await buses(name))
        assert (account.problems, account.damage, account.steps, account.trained) == ((), (), steps, 4 * steps)
        assert account.on_log == 4 * steps and account.with_metrics == steps


async def test_retracted_groups_are_not_trained_and_the_next_ones_take_their_place(
    buses: Buses, task: Path, tmp_path: Path
) -> None:
    run = there(task, tmp_path, f"reward.kind={HERE}:right", "run.steps=5")
    await train(run, await buses("run"), workers=2)
    branch = there(task, tmp_path, f"reward.kind={HERE}:right", "run.name=branch", "run.steps=6")
    found = await regrade_here(
        run,
        await buses("run"),
        branch=branch,
        target=await buses("branch"),
        where="step > 99",
        retract="group in (5, 6)",
    )
    assert found.retracted == {5, 6} and not found.changes
    history = present(RecordedRun(branch.run_directory).history())
    trained = [entry.groups for entry in history if entry.kind == "trained"]
    assert trained == [(0, 1, 2, 3), (4, 7, 8, 9), (10, 11, 12, 13), (14, 15, 16, 17)]  # 18 and 19 are left over
    await train(branch, await buses("branch"), resume=True)
    account = await account_with(RecordedRun(branch.run_directory), await buses("branch"))
    assert (account.problems, account.trained, account.dropped) == ((), 24, 2)
    history = present(RecordedRun(branch.run_directory).history())
    assert {18, 19} <= {i for entry in history if entry.kind == "trained" and entry.step == 5 for i in entry.groups}


def test_new_rewards_that_fail_or_a_filter_rejects_leave_the_batch(task: Path, tmp_path: Path) -> None:
    async def work() -> None:
        source, target = memory_bus(), memory_bus()
        run = there(task, tmp_path, f"reward.kind={HERE}:right", "algorithm.filters=['dynamic_sampling']")
        await train(run, source)
        branch = dataclasses.replace(
            there(task, tmp_path, f"reward.kind={HERE}:broken", "run.name=branch"), algorithm=run.algorithm
        )
        found = await regrade_here(run, source, branch=branch, target=target)
        broken = {one.group for one in found.changes if np.isnan(one.new)}
        assert broken
        history = present(RecordedRun(branch.run_directory).history())
        failed = {i for entry in history if entry.kind == "failed" for i in entry.groups}
        trained = {i for entry in history if entry.kind == "trained" for i in entry.groups}
        assert failed and failed <= broken and not trained & broken
        account = await account_with(RecordedRun(branch.run_directory), target)
        assert account.problems == ()

    asyncio.run(work())


def test_grades_of_another_reward_or_in_a_damaged_file_are_not_used(tmp_path: Path) -> None:
    path = grades_path(tmp_path, graded_by="one")
    grades = GradesFile(path)
    grades.add(Grade(sequence=1, group=0, rewards=((1.0, {"part": 0.5}), (0.0, {}))))
    grades.add(Grade(sequence=2, group=1, error="no"))
    made, failed = {1: grades.grades[1]}, {2: grades.grades[2]}
    grades.close()
    with path.open("ab") as file:
        file.write(b'{"sequence": 3')  # of a killed command
    for reward, its in (("two", {}), ("one", made)):
        again = GradesFile(grades_path(tmp_path, graded_by=reward))
        assert again.grades == its, "what failed is graded again"
        again.close()
    claim(tmp_path, {"reward": "one"})
    begun = GradesFile(path)
    assert begun.grades == made | failed, "and is on the branch's log"
    begun.close()
    path.write_text(path.read_text().replace("sequence", "sequences"))
    with pytest.raises(ConfigError, match="is damaged; remove it"):
        GradesFile(path)


def test_a_branch_that_one_command_began_is_not_gone_on_with_by_another(tmp_path: Path) -> None:
    claim(tmp_path, {"reward": "a", "where": "step > 4"})
    claim(tmp_path, {"where": "step > 4", "reward": "a"})
    with pytest.raises(ConfigError, match="another predicate began to write this branch; give that command again"):
        claim(tmp_path, {"reward": "a", "where": "step > 5"})
    assert [path.name for path in (tmp_path / "regrade").iterdir()] == ["begun.json"]


def test_a_branch_that_is_not_written_to_its_end_is_taken_for_no_run(task: Path, tmp_path: Path) -> None:
    branch = there(task, tmp_path, "run.name=branch")
    claim(branch.run_directory, {"reward": "a"})
    recorded = RecordedRun(branch.run_directory)
    for use in (recorded.history, lambda: account_of(branch.run_directory), lambda: check_settings(branch)):
        with pytest.raises(
            ConfigError, match="not written to its end; wait for its `asyncrl regrade` command, or give"
        ):
            use()


@pytest.mark.parametrize("retract", [True, False])
async def test_a_group_that_a_branch_cannot_change_is_refused_before_it_is_graded(
    retract: bool, tmp_path: Path
) -> None:
    bus, grader = memory_bus(), mock.AsyncMock()
    made = a_group(0)
    await bus.publish(TRAJECTORIES, made, key=answer_key(0, worker=made.worker, ticket=""))
    history = [HistoryEntry(kind="trained", incarnation=0, step=3, position=0, groups=(0,), sequences=(1,))]
    chosen = Predicate("step == 3", fields=FIELDS, where="--where")

    def refuse(step: int) -> None:
        raise ConfigError(f"step {step} is another learner's")

    with pytest.raises(ConfigError, match="step 3 is another learner's"):
        await regrade(
            bus,
            history,
            directory=tmp_path,
            finder=None,
            grader=grader,
            where=chosen,
            retract=chosen if retract else None,
            require=refuse,
        )
    grader.grade.assert_not_called()


def test_one_command_at_a_time_is_at_work_on_a_branch_and_leaves_no_empty_folder(tmp_path: Path) -> None:
    with alone(tmp_path / "out"), pytest.raises(ConfigError, match="another command is at work"):
        alone(tmp_path / "out").__enter__()
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be made: Not a directory"), alone(tmp_path / "file" / "out"):
        pass


def test_grades_are_of_the_code_of_every_part_of_the_reward(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "its_part.py").write_text("def f(sample): return 1.0")
    parts = '{exact = {kind = "exact"}, own = {kind = "its_part:f"}}'
    run = there(task, tmp_path, "reward.kind=parts", f"reward.parts={parts}")
    before = graded_by(run, label_file=None)
    assert graded_by(run, label_file=None) == before
    (tmp_path / "its_part.py").write_text("def f(sample): return 0.0")
    assert graded_by(run, label_file=None) != before


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_goes_on_where_it_was_interrupted_and_the_run_goes_on_from_its_branch(
    graded_wrong: RunConfig, task: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = graded_wrong.run_directory, task / "runs" / "run-regraded"
    command = ("regrade", run, "--reward", f"{HERE}:right")
    code, said, err = asyncrl(*command, "--dry-run", capsys=capsys)
    assert (code, said.splitlines()[-1]) == (0, "no branch is written"), err
    (grades,) = (out / "regrade").glob("grades-*.jsonl")
    code, _, err = asyncrl("regrade", run, "--reward", "exact", "--dry-run", capsys=capsys)
    assert code == 0, err  # another reward has grades of its own
    made = grades.read_bytes()
    grades.write_bytes(made[: len(made) // 2])  # as if killed in the middle of a line
    code, said, err = asyncrl(*command, capsys=capsys)
    assert code == 0, err
    assert sorted(grades.read_bytes().splitlines()) == sorted(made.splitlines())
    assert "advantages; the first step that differs is " in said
    assert said.splitlines()[-1] == (
        f"branch {out}: at step 6; go on with: {own_command()} run RUN.toml --set run.name=run-regraded "
        f"--set reward.kind={HERE}:right --resume"
    )
    lineage = lineage_of(out)
    assert lineage is not None
    assert (lineage["parent"], lineage["parent_step"], lineage["step"]) == (str(run), 6, 6)
    assert lineage["command"]["reward"] == f"{HERE}:right"
    branch = there(task, task / "runs", f"reward.kind={HERE}:right", "run.name=run-regraded", "run.steps=8")
    train_there(branch, resume=True)
    for folder, steps in ((run, 6), (out, 8)):
        found = audited(folder)
        assert (found["clean"], found["problems"], found["steps"]) == (True, [], steps)
    code, _, err = asyncrl(*command, capsys=capsys)
    assert (code, err.splitlines()[-1]) == (2, f"asyncrl: --out {out}: already holds a run; name another folder")


@pytest.mark.slow
def test_labels_of_a_file_replace_those_of_the_data(
    graded_wrong: RunConfig, task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [json.loads(line) for line in (task / "prompts.jsonl").read_text().splitlines()]
    corrected = tmp_path / "corrected.jsonl"
    corrected.write_text("".join(json.dumps(row | {"label": row["label"] * 2}) + "\n" for row in rows))
    command = ("regrade", graded_wrong.run_directory, "--reward", f"{HERE}:right", "--dry-run", "--json")
    code, said, err = asyncrl(*command, "--label-file", corrected, "--out", tmp_path / "all", capsys=capsys)
    assert code == 0, err
    assert json.loads(said)["changed"] > json.loads(said)["groups"] / 2  # labels are twice as long: rewards are lower
    few = tmp_path / "few.jsonl"
    few.write_text('{"group": 3, "label": "01234567"}\n{"row": 4, "label": "01234567"}\n')
    same = ("regrade", graded_wrong.run_directory, "--dry-run", "--json", "--label-file", few)
    code, said, err = asyncrl(*same, "--out", tmp_path / "few", "--where", "group < 8", capsys=capsys)
    assert (code, json.loads(said)["groups"]) == (0, 8), err
    assert json.loads(said)["changed"] <= 2


@pytest.mark.slow
def test_mistakes_get_one_line(graded_wrong: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*arguments: Any) -> str:
        code, _, err = asyncrl("regrade", *arguments, capsys=capsys)
        said = [line for line in err.splitlines() if not line.startswith("graded ")]  # progress, on a busy machine
        assert (code, len(said)) == (2, 1), err
        return said[0]

    run = graded_wrong.run_directory
    assert "say what to change" in refused(run)
    assert "did you mean step" in refused(run, "--reward", "exact", "--where", "stpe > 4")
    assert "--set run.steps=9: only keys of [reward]" in refused(run, "--set", "run.steps=9", "--out", tmp_path / "x")
    assert "reward.kind" in refused(run, "--reward", "exactt", "--out", tmp_path / "x")
    (tmp_path / "mine" / "weights").mkdir(parents=True)
    assert "holds files of something else" in refused(run, "--reward", f"{HERE}:right", "--out", tmp_path / "mine")
    failing = ("--reward", f"{HERE}:failing", "--out", tmp_path / "z")
    assert "groups can be graded; the first: " in (said := refused(run, *failing)) and "KeyError: 'y'" in said
    assert not (tmp_path / "z" / "regrade" / "begun.json").exists()
    assert "no batch is left" in refused(run, "--retract", "step >= 0", "--out", tmp_path / "none")
    assert not (tmp_path / "none").exists()
    copy = tmp_path / "run"
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("weights"))
    forge(copy / "history.jsonl", '"keep_log": true', '"keep_log": false')

    async def trim(server: EmbeddedServer) -> None:
        bus = await JetStreamBus.connect(
            server.url,
            run="run",
            token=server.token,
            max_prompts=256,
            max_log_bytes=2**30,
            ack_seconds=30.0,
            storage="file",
        )
        await bus.trim(TRAJECTORIES, through=6)
        await bus.close()

    with EmbeddedServer(copy / "nats", run="run") as server:
        asyncio.run(trim(server))
    trimmed = refused(copy, "--reward", f"{HERE}:right", "--out", tmp_path / "y")
    assert "is no longer on its log" in trimmed and "checkpoint.keep_log = true" in trimmed
