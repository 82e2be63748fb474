"""Labels: what is no answer is refused before the run, and an answer that says nothing is never right."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl import config
from asyncrl.errors import RewardError
from asyncrl.rewards.load import KINDS, label_check, load_reward
from tests.harness.rewards import load, sample, values

OPTIONS: dict[str, dict[str, Any]] = {
    "regex": {"pattern": "(.+)"},
    "llm_judge": {"url": "http://judge/v1", "model": "m", "template": "{answer} {label}"},
}
OF_TEXT = ("exact", "regex", "dapo", "f1", "rouge", "math", "deepscaler")
VERL = {"ground_truth": "5", "style": "rule"}


def check(kind: str, label: Any, metadata: dict[str, Any] | None = None) -> str:
    """Return the problem that is found before the run; "" if there is none."""
    section = config.RewardSection(kind=kind, options=OPTIONS.get(kind, {}))
    try:
        label_check(section)(label, metadata or {})
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", OF_TEXT)
@pytest.mark.parametrize("label", [None, "", " \n", [], [""], [None], float("nan"), True, [False], VERL, [VERL], b"5"])
def test_what_is_no_answer_is_refused_before_the_run(kind: str, label: Any) -> None:
    assert "label" in check(kind, label)


@pytest.mark.parametrize(
    "kind", [*OF_TEXT, "gpqa", "json_schema", "code", "ifeval", "ifbench", "llm_judge", "reasoning_gym"]
)
def test_a_table_of_verl_is_refused_with_the_key_that_holds_the_label(kind: str) -> None:
    pytest.importorskip("reasoning_gym" if kind == "reasoning_gym" else "math_verify")
    problem = check(kind, VERL)
    assert problem and "\n" not in problem
    if kind in (*OF_TEXT, "gpqa", "llm_judge"):
        assert 'label_key = "COLUMN.ground_truth"' in problem


def test_every_built_in_reward_that_reads_a_label_looks_at_it_before_the_run() -> None:
    reads_no_label = {"none", "random", "remote", "remote_rm", "parts", "reward_model"}
    for kind in KINDS.keys() - reads_no_label - {"reasoning_gym"}:
        options = OPTIONS.get(kind, {})
        assert hasattr(load_reward(config.RewardSection(kind=kind, options=options)).function, "check_label"), kind


@pytest.mark.parametrize(
    ("kind", "label"),
    [
        ("dapo", "$"),
        ("dapo", "the units"),
        ("dapo", "x ="),
        ("math", "$"),
        ("math", "\\boxed{}"),
        ("math", "\\text{ }"),
        ("deepscaler", ["5", "\\boxed{}"]),
        ("rouge", "+ - ?"),
        ("exact", ["a", "b"]),
        ("math", [1, 2]),
        ("gpqa", 4),
        ("gpqa", True),
        ("gpqa", ""),
        ("code", {"inputs": ["1"], "outputs": [" \n"]}),
        ("code", '{"inputs": ["1"], "outputs": [""]}'),
        ("ifeval", {"instruction_id_list": ["no:such"]}),
        ("ifeval", {"instruction_id_list": ["keywords:existence"], "kwargs": [{"nothing": 1}]}),
        ("llm_judge", " "),
        ("json_schema", {"title": "T"}),
        ("json_schema", {"$ref": "http://127.0.0.1:9/schema.json"}),
        ("json_schema", {"properties": {"a": {"$ref": "file:///etc/passwd"}}}),
        ("json_schema", {"allOf": [{"$ref": "#/$defs/missing"}]}),
    ],
)
def test_a_label_that_no_answer_or_every_answer_equals_is_refused(kind: str, label: Any) -> None:
    assert check(kind, label)


@pytest.mark.parametrize(
    ("kind", "label", "answer"),
    [
        *((kind, 5.0, "5") for kind in ("exact", "regex", "f1", "rouge")),
        *((kind, 5.0, "5.0") for kind in ("exact", "regex", "f1")),
        *((kind, ["5"], "5") for kind in ("exact", "regex", "f1", "rouge")),
        ("dapo", 5.0, "Answer: 5"),
        ("dapo", [5], "Answer: 5"),
        ("exact", -0.0, "0"),
        ("exact", 10**20, "1" + "0" * 20),
        ("f1", ["yes", "no"], "no"),
        ("gpqa", 1.0, "B"),
        ("gpqa", [1], "B"),
    ],
)
async def test_numbers_of_columns_with_gaps_and_lists_of_one_mean_the_same_answer(
    kind: str, label: Any, answer: str
) -> None:
    assert check(kind, label) == ""
    assert await values(load(kind, **OPTIONS.get(kind, {})), sample(answer, label=label)) == [1.0]


async def test_math_reads_a_float_and_a_list_of_one() -> None:
    pytest.importorskip("math_verify")
    reward = load_reward(config.RewardSection(kind="math", timeout_seconds=3600.0, options={"timeout_seconds": 600}))
    labels = [5.0, ["5"], [5.0], "5"]
    assert await values(reward, *(sample("\\boxed{5}", label=label) for label in labels)) == [1.0] * 4


@pytest.mark.parametrize(
    ("kind", "options", "label"),
    [
        ("dapo", {}, "5"),
        ("dapo", {"boxed": True}, "5"),
        ("exact", {"extract": "answer: ?(.*)"}, "5"),
        ("exact", {}, "5"),
        ("f1", {}, "5"),
        ("f1", {"extract": "answer: ?(.*)"}, "5"),
        ("rouge", {}, "5"),
        ("regex", {"pattern": "answer: ?(.*)"}, "5"),
        ("gpqa", {}, "A"),
    ],
)
async def test_an_answer_that_says_nothing_is_never_right(kind: str, options: dict[str, Any], label: str) -> None:
    wrong = -1.0 if kind == "dapo" else 0.0
    for text in ("", " ", "I do not know", "answer: ", "Answer:", "\\boxed{}"):
        assert await values(load(kind, **options), sample(text, label=label)) == [wrong]


@pytest.mark.parametrize("kind", OF_TEXT)
@pytest.mark.parametrize("label", ["", " ", None])
async def test_an_empty_label_is_an_error_and_no_reward(kind: str, label: Any) -> None:
    reward = load(kind, **OPTIONS.get(kind, {}))
    with pytest.raises(RewardError, match="label"):
        await values(reward, sample("<think></think>\\boxed{5}", label=label))


async def test_an_index_that_is_also_a_choice_is_refused() -> None:
    assert "write its letter" in check("gpqa", 2, {"choices": [1, 2, 3, 4]})
    assert check("gpqa", 2, {"choices": ["1", "2", "3", "4"]}) == ""
    assert check("gpqa", 2, {"choices": ["1", "2"]})
