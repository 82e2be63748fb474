"""The newest groups of a run: their fates, the groups with text, and one opened group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl import config
from asyncrl.actors.learner.history import HISTORY_FILE, History
from asyncrl.actors.learner.sample_files import EVALUATION_FILE, SAVED_MODELS_FILE, SampleFile
from asyncrl.board import group_index
from asyncrl.board.group_index import GroupIndex, OpenedGroup, rows_as_json
from asyncrl.errors import ConfigError
from asyncrl.messages.evaluation import FIRST_GROUP_ID
from asyncrl.policies.groups.sample import Answer, GroupSample

ANSWER = Answer(
    reward=0.25,
    advantage=-1.0,
    staleness=2,
    finish_reason="stop",
    turns=(("policy", "ab"),),
    tokens=(1, 2),
    logprobs=(-0.1, -0.2),
    versions=((0, 0, 3),),
)
SETTINGS = config.only_overrides(['run.name="r"'])


def sample(group_id: int, *, step: int, fate: str = "trained", reward: float = 0.25) -> GroupSample:
    answers = (ANSWER, Answer(reward=reward, tokens=(5,), logprobs=(-1.0,), versions=((0, 0, 3),), staleness=1))
    return GroupSample(
        group_id=group_id, fate=fate, step=step, worker="w1", prompt=f"what is {group_id}", answers=answers
    )


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    made = History(tmp_path / HISTORY_FILE, incarnation=0)
    made.begin(step=0, kept=0, max_staleness=4, settings={})
    yield made
    made.close()


@pytest.fixture
def file(tmp_path: Path) -> SampleFile:
    return SampleFile(tmp_path, most_bytes=2**20)


@pytest.fixture
def index(tmp_path: Path) -> GroupIndex:
    return GroupIndex(lambda: SETTINGS, tmp_path, token="")


def train(history: History, groups: Sequence[int], *, step: int) -> None:
    history.record_trained(tuple(groups), step=step, sequences=tuple(groups), max_staleness=1)


def ids(index: GroupIndex, **wanted: object) -> list[int]:
    index.refresh()
    return [row.group_id for row in index.rows(**wanted)[0]]  # type: ignore[arg-type]


def test_groups_are_listed_with_what_became_of_them(index: GroupIndex, history: History, file: SampleFile) -> None:
    train(history, [0, 1], step=1)
    history.record_lost("dropped", (2,), step=1)
    file.write(sample(1, step=1, reward=0.75))
    assert sorted(ids(index)) == [0, 1, 2]
    assert ids(index, fate="dropped") == [2]
    assert ids(index, has_text=True) == [1]
    (row,), total = index.rows(text="WHAT IS 1")
    assert (total, row.reward, row.lowest, row.highest, row.staleness, row.tokens) == (1, 0.5, 0.25, 0.75, 2, 3)
    train(history, [3], step=2)
    assert ids(index)[0] == 3
    assert "position" not in next(rows_as_json(index.rows()[0]))


def test_the_worst_and_the_best_come_first(index: GroupIndex, history: History, file: SampleFile) -> None:
    train(history, [0, 1, 2], step=1)
    file.write(sample(0, step=1, reward=0.1))
    file.write(sample(1, step=1, reward=0.9))
    assert ids(index, order="worst") == [0, 1, 2]
    assert ids(index, order="best") == [1, 0, 2]
    assert ids(index, order="no such order")


def test_groups_lost_by_a_fallback_are_not_listed(index: GroupIndex, history: History, tmp_path: Path) -> None:
    train(history, [0], step=1)
    kept = history.position
    train(history, [1], step=2)
    assert sorted(ids(index)) == [0, 1]
    resumed = History(tmp_path / HISTORY_FILE, incarnation=1)
    resumed.begin(step=1, kept=kept, max_staleness=4, settings={})
    resumed.close()
    assert ids(index) == [0]


def test_prompts_of_evaluations_are_listed_apart_and_opened(
    index: GroupIndex, history: History, file: SampleFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_index, "load_decode", lambda path: lambda tokens: str(tokens))
    monkeypatch.setattr(group_index, "MOST_GROUPS", 4)
    train(history, [0], step=1)
    run_s, saved = (SampleFile(tmp_path, name=name) for name in (EVALUATION_FILE, SAVED_MODELS_FILE))
    for place in range(5):
        row = replace(sample(FIRST_GROUP_ID, step=20, fate="evaluated"), dataset="sums", place=place, label="4")
        run_s.write(row)
    saved.write(replace(row, model="0-20"))
    assert ids(index) == [0]
    rows, total = index.rows(fate="evaluated", text="sums")
    assert total == 4, "the newest"
    assert {(row.place, row.model) for row in rows} == {(4, None), (3, None), (2, None), (1, None)}
    opened = index.open(next(row.group_id for row in rows if row.place == 3)).sample
    assert (opened.name, opened.label) == ("sums, prompt 3", "4")
    (tmp_path / EVALUATION_FILE).write_text("")
    with pytest.raises(ConfigError, match="not here any more"):
        index.open(next(row.group_id for row in rows if row.place == 3))


def test_recorded_group_is_opened_after_file_rotation(
    index: GroupIndex, history: History, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = SampleFile(tmp_path, most_bytes=2**12)
    train(history, range(8), step=1)
    monkeypatch.setattr(
        group_index, "load_decode", lambda path: lambda tokens: "".join(chr(96 + one) for one in tokens)
    )
    for number in range(8):
        small.write(sample(number, step=1))
        index.refresh()
    assert (tmp_path / "samples.1.jsonl").exists()
    opened = index.open(7)
    assert opened.sample.prompt == "what is 7"
    assert [list(texts) for texts in opened.texts] == [["a", "b"], ["e"]]


def test_without_the_tokenizer_the_recorded_text_is_there(
    index: GroupIndex, history: History, file: SampleFile
) -> None:
    train(history, [0], step=1)
    file.write(sample(0, step=1))
    index.refresh()
    opened: OpenedGroup = index.open(0)
    assert opened.sample.answers[0].text == "ab"
    assert (opened.texts, "model.path" in opened.problem) == ((), True)


def test_unrecorded_group_is_refused_with_the_reason(index: GroupIndex, history: History) -> None:
    train(history, [0], step=1)
    index.refresh()
    with pytest.raises(ConfigError, match=r"text of group 0 is not here\. metrics\.samples_per_step"):
        index.open(0)


CHATML = "<|im_start|>system\nYou are helpful.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
HARMONY = "<|start|>system<|message|>Be brief.<|end|><|start|>user<|message|>{}<|end|><|start|>assistant"
FEW_SHOT = "Answer as in these examples. Q: 1 + 1 A: 2. Q: 2 + 3 A: 5. Now you. Q: {}"


@pytest.mark.parametrize("template", [CHATML, HARMONY, FEW_SHOT])
def test_groups_are_told_apart_by_what_the_user_asks_and_show_their_label(
    template: str, index: GroupIndex, history: History, file: SampleFile
) -> None:
    for group_id, question in enumerate(("7 + 8", "9 + 9")):
        file.write(replace(sample(group_id, step=1), prompt=template.format(question), label=f"{15 + 3 * group_id}"))
    train(history, [0, 1], step=1)
    index.refresh()
    rows = list(rows_as_json(index.rows()[0]))
    assert sorted((row["prompt"].removeprefix("… "), row["label"]) for row in rows) == [
        ("7 + 8", "15"),
        ("9 + 9", "18"),
    ]
    assert index.rows(text="18")[1] == 1


def test_one_prompt_is_shown_from_its_beginning(index: GroupIndex, history: History, file: SampleFile) -> None:
    file.write(replace(sample(0, step=1), prompt=FEW_SHOT.format("7 + 8")))
    train(history, [0], step=1)
    index.refresh()
    (shown,) = rows_as_json(index.rows()[0])
    assert shown["prompt"] == FEW_SHOT.format("7 + 8")[: group_index.PREVIEW]
    assert shown["label"] is None
