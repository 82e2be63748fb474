"""`asyncrl samples`: shows the model's texts from a folder, from the log, and live; and tests of its refusals."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from asyncrl import config
from asyncrl.actors.learner.history import HISTORY_FILE, History
from asyncrl.actors.learner.sample_files import EVALUATION_FILE, SAVED_MODELS_FILE, SampleFile
from asyncrl.actors.learner.sample_recorder import AnswerRecorder, SampleWriter
from asyncrl.audit import samples
from asyncrl.audit.evaluated import EvaluationSamples
from asyncrl.audit.samples import RunSamples
from asyncrl.bus.port import Bus
from asyncrl.data import demo_task
from asyncrl.messages.evaluation import FIRST_GROUP_ID
from asyncrl.messages.topics import TRAJECTORIES
from asyncrl.os_process import process_space
from asyncrl.policies.groups.sample import Answer, GroupSample
from tests.harness import buses
from tests.harness.command import asyncrl
from tests.harness.evaluation import evaluating_worker, section, sums
from tests.harness.fakes import Engine, Loop, run_all, run_worker, worker
from tests.harness.learning import demo_run, memory_bus, train

SETTINGS = {"model": {"path": "nowhere"}, "data": {"path": "d"}, "bus": {"kind": "memory"}}


def answer(text: str, *, reward: float) -> Answer:
    return Answer(
        *(),
        reward=reward,
        advantage=reward / 2,
        finish_reason="stop",
        turns=(("policy", text),),
        tokens=(1, 2),
        versions=((0, 0, 3),),
    )


def row(group_id: int, *texts: str, step: int = 1, reward: float = 0.5, **fields: Any) -> GroupSample:
    answers = tuple(answer(text, reward=reward + index) for index, text in enumerate(texts))
    return GroupSample(group_id=group_id, step=step, prompt=f"prompt {group_id}", answers=answers, **fields)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Groups 0 to 5 have left the window, and some of them are recorded. The bus was in memory and is gone."""
    history = History(tmp_path / HISTORY_FILE, incarnation=0)
    history.begin(step=0, kept=0, max_staleness=4, settings=SETTINGS)
    history.record_trained([0, 1], step=1, max_staleness=0)
    history.record_lost("dropped", [2], step=1)
    history.record_lost("filtered", [3], step=1)
    history.record_trained([4, 5], step=2, max_staleness=0)
    history.close()
    file = SampleFile(tmp_path, most_bytes=2**20)
    file.write(row(0, "seven", "eight", fate="trained"))
    file.write(row(2, "nine\x1b[2Jlong\nline", fate="dropped", reason="stale, 6 versions old"))
    file.write(row(1, "was rolled back", step=9, fate="trained"))
    file.write(row(3, "bad", reward=-3.0, fate="filtered", reason="by dynamic_sampling"))
    file.write(row(4, "ten", step=2, fate="trained", worker="w7"))
    return tmp_path


def test_it_shows_answers_rewards_and_what_became_of_them(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = asyncrl("samples", folder, capsys=capsys)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "group 0   trained at step 1   reward 1.000"
    assert lines[1:3] == ["prompt", "  prompt 0"]
    assert lines[3] == "answer 1 of 2   reward 0.500   advantage +0.250   2 tokens   stop   version 3"
    assert lines[4] == "  seven"
    assert "group 2   dropped at step 1   (stale, 6 versions old)   reward 0.500" in lines
    assert "group 4   trained at step 2   reward 0.500   worker w7" in lines
    assert "was rolled back" not in out
    assert lines[-1].startswith(
        "4 groups shown, of 6 that are done (trained, dropped, failed or filtered). Some groups of each step are "
        "recorded"
    )


def test_a_models_text_cannot_move_the_cursor(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = asyncrl("samples", folder, "--group", 2, capsys=capsys)
    assert "\x1b" not in out
    assert "  nine?[2Jlong\n  line\n" in out


def test_groups_are_chosen_by_reward_by_chance_by_text_and_by_number(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def chosen(*arguments: Any) -> list[int]:
        code, out, _ = asyncrl("samples", folder, "--json", *arguments, capsys=capsys)
        assert code == 0
        return [json.loads(line)["group_id"] for line in out.splitlines()]

    assert chosen("--limit", 2) == [3, 4]
    assert chosen("--worst", "--limit", 1) == [3]
    assert chosen("--random", "--limit", 2) == chosen("--random", "--limit", 2)
    assert {tuple(chosen("--random", "--seed", seed, "--limit", 1)) for seed in range(20)} == {(0,), (2,), (3,), (4,)}
    assert chosen("--grep", "seven|ten") == [0, 4]
    assert chosen("--grep", "dynamic_") == [3]
    assert chosen("--group", 4) == [4]


def test_of_a_group_without_text_it_says_what_is_known(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = asyncrl("samples", folder, "--group", 5, capsys=capsys)
    assert code == 0
    assert out.startswith("group 5   trained at step 2: its text is not here. Some groups of each step are recorded")
    assert "keeps the log in the run's own process" in out


@pytest.fixture
def judged(folder: Path) -> Path:
    """Also has two recorded evaluations of two data sets."""
    file = SampleFile(folder, name=EVALUATION_FILE)
    for step in (0, 20):
        for place, dataset in ((3, "sums"), (9, "words")):
            file.write(judged_row(f"by step {step}", step=step, dataset=dataset, place=place, time=float(step + place)))
    file.write(judged_row("once more", step=0, dataset="sums", place=3, time=3.0))
    return folder


async def arriving(source: RunSamples, bus: Bus) -> list[GroupSample]:
    """Collect samples until the run ends."""
    async with contextlib.aclosing(source.follow_log(bus)) as groups:
        return [sample async for sample in groups]


def judged_row(text: str, **fields: Any) -> GroupSample:
    return row(FIRST_GROUP_ID, text, fate="evaluated", label="12", **fields)


def test_answers_of_evaluations_are_shown_with_what_is_right(judged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = asyncrl("samples", judged, "--evaluation", capsys=capsys)
    lines = out.splitlines()
    assert [line for line in lines if "evaluated" in line] == [
        "sums, prompt 3   evaluated at step 0   reward 0.500",
        "words, prompt 9   evaluated at step 0   reward 0.500",
        "sums, prompt 3   evaluated at step 20   reward 0.500",
        "words, prompt 9   evaluated at step 20   reward 0.500",
    ]
    assert lines[-1] == "answers to 4 prompts shown"
    assert lines[lines.index("label") + 1] == "  12"
    assert "  once more" in lines and "seven" not in out


def test_of_evaluations_a_data_set_and_a_step_are_chosen(judged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def chosen(*arguments: Any) -> list[tuple[str, int]]:
        code, out, _ = asyncrl("samples", judged, "--json", *arguments, capsys=capsys)
        assert code == 0
        return [(row["name"], row["step"]) for row in map(json.loads, out.splitlines())]

    assert chosen("--evaluation", "sums") == [("sums, prompt 3", 0), ("sums, prompt 3", 20)]
    assert chosen("--evaluation", "--step", 20) == [("sums, prompt 3", 20), ("words, prompt 9", 20)]
    assert chosen("--evaluation", "--grep", "by step 0") == [("words, prompt 9", 0)]
    assert chosen("--step", 1) == [("group 0", 1)]
    assert chosen("--evaluation", "words", "--group", 9) == [("words, prompt 9", 0), ("words, prompt 9", 20)]
    assert chosen("--evaluation", "--group", 4) == []


def test_answers_of_saved_models_are_shown_with_those_of_the_run(
    judged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`asyncrl evaluate` records them in a separate file."""
    file = SampleFile(judged, name=SAVED_MODELS_FILE)
    for model in ("0-20", "1-20"):
        file.write(judged_row("of a saved model", step=20, dataset="sums", place=3, model=model, time=50.0))
    _, out, _ = asyncrl("samples", judged, "--evaluation", "sums", "--step", 20, capsys=capsys)
    assert [line for line in out.splitlines() if line.startswith("sums")] == [
        "sums, prompt 3   evaluated at step 20   reward 0.500",
        "sums, prompt 3   of 0-20   reward 0.500",
        "sums, prompt 3   of 1-20   reward 0.500",
    ]


@pytest.mark.parametrize("more", [(), ("--json",), ("--follow",)], ids=" ".join)
def test_a_data_set_that_nobody_knows_is_refused(
    judged: Path, more: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {**SETTINGS, "evaluation": {"datasets": [{"name": "sums", "path": "p"}, {"name": "words", "path": "p"}]}}
    history = History(judged / HISTORY_FILE, incarnation=1)
    history.begin(step=2, kept=0, max_staleness=4, settings=settings)
    history.close()
    code, _, err = asyncrl("samples", judged, "--evaluation", "sum", *more, capsys=capsys)
    assert (code, err) == (2, "asyncrl: --evaluation sum: no such data set; there are sums, words\n")


def test_a_run_that_stands_behind_the_option_is_named(judged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = asyncrl("samples", "--evaluation", judged, capsys=capsys)
    assert code == 2
    assert "is no data set; write RUN before --evaluation" in err


def test_without_an_evaluation_it_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = asyncrl("samples", folder, "--evaluation", capsys=capsys)
    why = "None is recorded: nothing is evaluated yet, or metrics.samples_per_evaluation = 0"
    assert out == f"answers to 0 prompts shown. {why}\n"


def test_tokens_that_make_no_text_end_nothing(
    judged: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode(tokens: Any) -> str:
        raise OverflowError("can't convert 4294967295")

    monkeypatch.setattr("asyncrl.data.tokenizer.load_decode", lambda path: decode)
    undecoded = dataclasses.replace(judged_row("x", dataset="sums", step=30, time=99.0), prompt=None)
    SampleFile(judged, name=EVALUATION_FILE).write(undecoded)
    code, out, _ = asyncrl("samples", judged, "--evaluation", "sums", capsys=capsys)
    assert code == 0
    assert "(no text: OverflowError: can't convert 4294967295)" in out and "once more" in out


async def test_from_the_bus_alone_answers_of_an_evaluation_are_shown(bus_factory: Any, tmp_path: Path) -> None:
    """Shows the existing answers of the newest evaluation, and those that arrive until the run ends."""
    onlooker = await bus_factory()
    silent = SampleWriter(SampleFile(tmp_path / "there", most_bytes=2**20), load_decode=lambda: str)
    loop = Loop(
        await bus_factory(),
        tmp_path,
        steps=4,
        evaluation=section(every_steps=2),
        evaluation_sets=[sums()],
        answers=AnswerRecorder(silent, per_dataset=2),
        writers=[silent],
    )
    source = EvaluationSamples(loop.run, None, token="")
    async with asyncio.TaskGroup() as group:
        looking = group.create_task(arriving(source, onlooker))
        await run_all(loop, evaluating_worker(await bus_factory(), Engine(), name="w0"))
        seen = await looking
    assert {0, 4} <= {sample.step for sample in seen} <= {0, 2, 3, 4}
    assert all((sample.fate, sample.dataset, sample.label) == ("evaluated", "sums", "1") for sample in seen)
    logged = [sample async for sample in source.read_log(onlooker)]
    assert [(sample.step, len(sample.answers)) for sample in logged] == [(4, 2)] * 2
    assert [
        sample async for sample in EvaluationSamples(loop.run, None, token="", dataset="x").read_log(onlooker)
    ] == []


REFUSED = {
    ("--group", "77"): "--group 77: no such group is recorded; groups 0 to 5 are done",
    ("--grep", "["): "--grep [: is not a regular expression",
    ("--limit", "0"): "--limit 0: must be 1 or more",
}


@pytest.mark.parametrize("arguments", REFUSED, ids=" ".join)
def test_bad_input_is_refused_in_one_line(
    arguments: tuple[str, ...], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = asyncrl("samples", folder, *arguments, capsys=capsys)
    assert (code, out) == (2, "")
    assert REFUSED[arguments] in err and err.count("\n") == 1


def test_a_folder_of_a_run_that_is_over_is_read_wherever_it_is_now_and_not_followed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    renamed = tmp_path / "kept"
    renamed.mkdir()
    settings = SETTINGS | {"bus": {"kind": "nats"}, "run": {"name": "n1"}}
    history = History(renamed / HISTORY_FILE, incarnation=0)
    history.begin(step=0, kept=0, max_staleness=4, settings=settings)
    history.record_trained([0], step=1, max_staleness=0)
    history.close()
    SampleFile(renamed, most_bytes=2**20).write(row(0, "seven", fate="trained"))
    code, out, err = asyncrl("samples", renamed, capsys=capsys)
    assert (code, "seven" in out, err) == (0, True, "")
    code, out, err = asyncrl("samples", renamed, "--follow", capsys=capsys)
    assert (code, out, "the run is over, or was stopped" in err) == (2, "", True)


def test_a_folder_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = asyncrl("samples", tmp_path, capsys=capsys)
    assert code == 2 and err.count("\n") == 1


def test_a_file_is_followed_through_its_rotation(folder: Path) -> None:
    source = RunSamples(config.only_overrides([]), folder, token="")
    file = SampleFile(folder, most_bytes=2**20)
    growing = source.follow_file()
    file.write(row(10, "a"))
    assert next(growing).group_id == 10
    file.write(row(11, "b"))
    small = SampleFile(folder, most_bytes=1)  # each line makes the file before it the older one
    small.write(row(12, "c"))
    assert [next(growing).group_id for _ in range(2)] == [11, 12]
    small.write(row(13, "d"))
    assert next(growing).group_id == 13
    growing.close()


@pytest.mark.parametrize("bus", ["nats", "memory"])
def test_a_file_is_followed_until_its_run_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bus: str) -> None:
    monkeypatch.setattr(samples, "LOOK_SECONDS", 0.0)
    history = History(tmp_path / HISTORY_FILE, incarnation=0)
    settings = SETTINGS | {"bus": {"kind": bus}, "run": {"steps": 2}}
    history.begin(step=0, kept=0, max_staleness=4, settings=settings)
    history.record_trained([0], step=1, max_staleness=0)
    (tmp_path / "bus.json").touch()
    file = SampleFile(tmp_path, most_bytes=2**20)
    source = RunSamples(config.only_overrides([f"bus.kind={bus}"]), tmp_path, token="")
    growing = source.follow_file()
    file.write(row(0, "a"))
    assert next(growing).group_id == 0
    assert not source.is_over()
    history.record_trained([1], step=2, max_staleness=0)
    history.close()
    (tmp_path / "bus.json").unlink()
    file.write(row(1, "b", step=2))  # after the step, as it is decoded in the background
    assert [sample.group_id for sample in growing] == [1]
    assert list(source.follow_file()) == []


def test_a_run_whose_processes_were_killed_is_over_on_its_machine_and_not_known_to_be_elsewhere(tmp_path: Path) -> None:
    source = RunSamples(config.only_overrides([]), tmp_path, token="")
    killed = subprocess.Popen(["true"])
    killed.wait()
    for host, pid, is_over in (
        (process_space(), os.getpid(), False),
        (process_space(), killed.pid, True),
        ("elsewhere", killed.pid, False),
    ):
        (tmp_path / "bus.json").write_text(json.dumps({"url": "", "token": "", "pid": pid, "host": host}))
        assert source.is_over() == is_over


def test_nothing_is_followed_of_a_run_that_is_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    history = History(tmp_path / HISTORY_FILE, incarnation=0)
    history.begin(step=0, kept=0, max_staleness=4, settings=SETTINGS | {"run": {"steps": 1}})
    history.record_trained([0], step=1, max_staleness=0)
    history.close()
    assert asyncrl("samples", tmp_path, "--follow", capsys=capsys) == (0, "", "")


async def test_the_log_gives_what_was_not_recorded(bus_factory: Any, tmp_path: Path) -> None:
    bus = await bus_factory()
    loop = Loop(bus, tmp_path, steps=4)
    await run_all(loop, worker(await bus_factory(), Engine()))
    source = RunSamples(loop.run, tmp_path, token="")
    logged = [sample async for sample in source.read_log(bus)]
    fates = {sample.group_id: (sample.fate, sample.step) for sample in logged}
    trained = {group_id: fate for group_id, fate in fates.items() if fate[0] == "trained"}
    assert len(trained) == 8
    assert all(source.fates.of[group_id].step == step for group_id, (_, step) in trained.items())
    assert all(sample.fate in ("trained", "pending", "dropped") for sample in logged)
    assert all(sample.staleness is not None for sample in logged if sample.fate == "trained")
    assert len([sample async for sample in source.read_log(bus, newest=3)]) == 3


async def test_from_the_bus_alone_groups_are_shown_as_they_meet_their_fate(bus_factory: Any, tmp_path: Path) -> None:
    """As another machine sees a run that is up: the output ends with the run, and the run is not changed."""
    bus, onlooker = await bus_factory(), await bus_factory()
    loop = Loop(bus, tmp_path, steps=4)
    source = RunSamples(loop.run, None, token="")
    engine = Engine()
    engine.gate.clear()
    async with asyncio.TaskGroup() as group:
        looking = group.create_task(arriving(source, onlooker))
        group.create_task(run_worker(worker(await bus_factory(), engine)))
        learning = group.create_task(loop.run_learner())
        await asyncio.sleep(0)
        engine.gate.set()
        await learning
        seen = await looking
    trained = {sample.group_id: sample.step for sample in seen if sample.fate == "trained"}
    assert set(trained.values()) == {1, 2, 3, 4}
    assert len(trained) == 8
    assert all(len(sample.answers) == 2 for sample in seen)
    assert await bus.depth(TRAJECTORIES) >= 8


async def test_records_under_a_key_that_no_group_has_are_passed_over(bus_factory: Any, tmp_path: Path) -> None:
    bus = await bus_factory()
    loop = Loop(bus, tmp_path, steps=1)
    await run_all(loop, worker(await bus_factory(), Engine()))
    source = RunSamples(loop.run, tmp_path, token="")
    before = [sample.group_id async for sample in source.read_log(bus)]
    await bus.publish(TRAJECTORIES, buses.group(0), key="x")
    assert [sample.group_id async for sample in source.read_log(bus)] == before


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


async def test_a_training_group_shows_the_label_that_its_reward_compares_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    demo_task.write(tmp_path)
    run = demo_run(tmp_path, "run.steps=2")
    await train(run, memory_bus())
    prompts = {row["prompt"]: row["label"] for row in rows_of(tmp_path / "prompts.jsonl")}
    groups = rows_of(run.run_directory / "samples.jsonl")
    assert [group["label"] for group in groups] == [prompts[group["prompt"]] for group in groups]
    code, out, _ = await asyncio.to_thread(asyncrl, "samples", run.run_directory, capsys=capsys)
    lines = out.splitlines()
    assert code == 0
    assert lines[lines.index("label") + 1].strip() in prompts.values()
