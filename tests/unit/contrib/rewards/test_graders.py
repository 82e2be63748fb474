"""Built-in rewards, on examples worked by hand from their definitions."""

from __future__ import annotations

import json
from typing import Any

import pytest

from asyncrl import config
from asyncrl.contrib.rewards import dapo, gpqa
from asyncrl.errors import ConfigError, RewardError
from asyncrl.rewards.load import label_check, load_reward
from tests.harness.rewards import load, sample, values


async def assert_rewards(kind: str, cases: list[tuple[str, Any, float]], **options: Any) -> None:
    got = await values(load(kind, **options), *(sample(text, label=label) for text, label, _ in cases))
    assert got == pytest.approx([value for _, _, value in cases])


# -- mathematics -------------------------------------------------------------------------------------------------------


async def test_math_takes_an_answer_that_reads_like_its_label() -> None:
    pytest.importorskip("math_verify")
    cases = [
        ("A", "A", 1.0),
        (" (A).", "A", 1.0),
        ("\\boxed{A}", "A", 1.0),
        ("so it is \\boxed{\\text{(A)}}", "A", 1.0),
        ("B", "A", 0.0),
        ("yes", "yes", 1.0),
        ("\\boxed{\\frac{1}{23}}", "\\frac{12}{3}", 0.0),
        ("\\boxed {0.5}, not 3", "\\frac12", 1.0),
        ("\\fbox{\\frac12}", "0.5", 1.0),
    ]
    await assert_rewards("math", cases)


async def test_dapo_compares_the_last_answer_line() -> None:
    cases = [
        ("So.\nAnswer: 42", "42", 1.0),
        ("Answer: 41\nno, answer : 42.", "42", 1.0),
        ("Answer: $x = 42$", "42", 1.0),
        ("Answer: \\boxed{42}", "42", 1.0),
        ("Answer: 1,234 dollars", "1234", 1.0),
        ("Answer: \\dfrac12", "\\frac{1}{2}", 1.0),
        ("Answer: 90^\\circ", "90", 1.0),
        ("Answer: \\text{north}", "north", 1.0),
        ("Answer: \\sqrt2", "\\sqrt{2}", 1.0),
        ("**Answer:** 42", "42", 1.0),
        ("**Answer: x = 42**", "42", 1.0),
        ("Answer: **\\(42\\)**.", "42", 1.0),
        ("Answer: 2*3", "2*3", 1.0),
        ("Answer: x <= 42", "42", -1.0),
        ("Answer: x != 42", "42", -1.0),
        ("Answer: x >= 42", "x>=42", 1.0),
        ("Answer: 41", "42", -1.0),
        ("Answer: 0.5", "\\frac{1}{2}", -1.0),
        ("42", "42", -1.0),
        ("Answer: 42" + "." * 300, "42", -1.0),
    ]
    await assert_rewards("dapo", cases)
    await assert_rewards(
        "dapo", [("Answer: 41 \\boxed{42}", "42", 1.0), ("Answer: 42", "42", 0.0)], boxed=True, wrong=0.0
    )


@pytest.mark.parametrize(
    ("kind", "needs", "good", "bad"),
    [
        ("math", "math_verify", ["A", "5", 7, "\\text{x}"], ["", " ", "\\text{}", "$ $"]),
        ("deepscaler", "math_verify", ["5", ["1", "\\boxed{2}"]], ["\\boxed{}", ["1", ""]]),
        ("json_schema", "jsonschema", ["true", {"type": "object"}, '{"type": "object"}'], ["no", None, {"type": "x"}]),
    ],
)
def test_a_label_that_fails_its_group_is_refused_before(kind: str, needs: str, good: list[Any], bad: list[Any]) -> None:
    pytest.importorskip(needs)
    check = label_check(config.RewardSection(kind=kind))
    for label in good:
        check(label, {})
    for label in bad:
        with pytest.raises(ValueError, match="label|schema"):
            check(label, {})


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("10 square units", "10"),
        ("the 5 minutes", "5"),
        ("1,2,3", "1,2,3"),
        ("12,345,678", "12345678"),
        ("50\\%", "50"),
        ("$\\frac ab$", "\\frac{a}{b}"),
        ("kmax", "kmax"),
        ("theta", "theta"),
    ],
)
def test_dapo_writes_answers_alike(text: str, normal: str) -> None:
    assert dapo.normal(text) == normal


async def test_deepscaler_judges_the_box_after_the_thinking() -> None:
    pytest.importorskip("math_verify")
    cases: list[tuple[str, Any, float]] = [
        ("<think>\\boxed{1}</think> It is \\boxed{\\frac{1}{2}}", "0.5", 1.0),
        ("<think>hm</think>\\boxed{2}", "\\boxed{2}", 1.0),
        ("<think>hm</think>\\boxed{2}", ["3", "2"], 1.0),
        ("<think>\\boxed{2}</think> It is 2", "2", 0.0),
        ("\\boxed{2}", "2", 0.0),
        ("<think>hm</think>\\boxed{3}", "2", 0.0),
    ]
    await assert_rewards("deepscaler", cases)
    await assert_rewards("deepscaler", [("\\boxed{2}", "2", 1.0)], needs_thinking=False)
    guess = sample("Perhaps \\boxed{2}", label="2", prompt="1 + 1?<think>\n")
    assert await values(load("deepscaler", needs_thinking=False), guess) == [0.0]


# -- choices and text --------------------------------------------------------------------------------------------------


async def test_gpqa_finds_the_letter_that_was_chosen() -> None:
    cases: list[tuple[str, Any, float]] = [
        ("The answer is (B).", "B", 1.0),
        ("Answer: B", "B", 1.0),
        ("**Answer:** B", "B", 1.0),
        ("the correct answer is **C**", "C", 1.0),
        ("\\boxed{\\text{B}}", "B", 1.0),
        ("<think>The answer is A</think>B", "B", 1.0),
        ("b", "B", 1.0),
        ("It is clear.\nB) because it is", "(B)", 1.0),
        ("first answer: A, then answer: D", 3, 1.0),
        ("A good start is to compare", "A", 0.0),
        ("The answer is Absent", "A", 0.0),
        ("I do not know", "D", 0.0),
        ("", "A", 0.0),
    ]
    await assert_rewards("gpqa", cases)
    await assert_rewards("gpqa", [("Answer: F", "F", 1.0)], letters="ABCDEF")


@pytest.mark.parametrize(
    "text",
    [
        "The correct answer is option C.",
        "The correct answer is choice (C).",
        "**Final answer: Option C**",
        "The answer is \\textbf{C}",
        "The answer is $\\mathbf{C}$",
        "The answer is \\(\\text{C}\\), not A.",
        "The answer is `C`",
        'The final answer is "C".',
        "answer: c",
        "The answer is (c).\nIt is not a.",
    ],
)
def test_gpqa_reads_common_ways_to_state_a_choice(text: str) -> None:
    assert gpqa.GpqaReward(gpqa.Options()).vote(text) == "C"


async def test_gpqa_reads_the_metadata_of_rows_of_slime() -> None:
    rows = [
        sample("B", label="iron", metadata={"choices": {"A": "gold", "B": "iron"}}),
        sample("B", label="iron", metadata={"choices": ["gold", "iron"]}),
        sample("C", label="the third", metadata={"correct_letter": "C"}),
        sample("A", label="A", metadata={"correct_letter": "c"}),
    ]
    assert await values(load("gpqa"), *rows) == [1.0, 1.0, 1.0, 0.0]


async def test_f1_counts_words_as_squad_does() -> None:
    cases: list[tuple[str, Any, float]] = [
        ("The cat sat.", "cat sat", 1.0),
        ("a big cat", "the cat", 2 / 3),  # 1 of 2 words is right, 1 of 1 is found
        ("cat cat dog", "cat dog dog", 2 / 3),  # one cat and one dog in common, of 3 and 3 words
        ("dog", "cat", 0.0),
        ("", "cat", 0.0),
        ("yes it is", "yes", 0.0),
        ("Yes.", "yes", 1.0),
        ("two", ["one", "two"], 1.0),
        ("<think>cat</think>dog", "dog", 1.0),
    ]
    await assert_rewards("f1", cases)
    await assert_rewards("f1", [("The cat.", "cat", 1.0), ("big cat", "cat", 0.0)], metric="exact_match")
    await assert_rewards("f1", [("<a>no</a> <a>cat</a> dog", "cat", 1.0), ("cat", "cat", 0.0)], extract="<a>(.*?)</a>")


async def test_rouge_is_the_f_measure_of_words_in_common() -> None:
    # Common words: police, the, gunman of 4 and 4; pairs: "the gunman" of 3 and 3; in order: the same 3 of 4 and 4.
    text, label = "police ended the gunman", "police kill the gunman"
    (reward,) = await load("rouge")([sample(text, label=label)])
    assert reward.value == 0.75
    assert reward.parts == pytest.approx({"rouge1": 0.75, "rouge2": 1 / 3, "rougeL": 0.75})
    await assert_rewards(
        "rouge", [("the gunman police", "police the gunman", 2 / 3), ("", "a", 0.0), ("b", ["a", "b"], 1.0)]
    )


# -- JSON --------------------------------------------------------------------------------------------------------------

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


async def test_json_is_judged_by_the_rows_schema_or_that_of_all() -> None:
    pytest.importorskip("jsonschema")
    cases: list[tuple[str, Any, float]] = [
        ('{"n": 1}', SCHEMA, 1.0),
        ('Here:\n```json\n{"n": 1}\n```', SCHEMA, 1.0),
        ('Here:\n```json\n{"n": 1}\n```\nIt says:\n```\nn is 1\n```', SCHEMA, 1.0),
        ('{"n": "1"}', SCHEMA, 0.0),
        ("n = 1", SCHEMA, 0.0),
        ("[" * 100_000, SCHEMA, 0.0),
        ('{"n": 1, "m": NaN}', SCHEMA, 0.0),
    ]
    await assert_rewards("json_schema", cases)
    for text, is_json in (('{"n": "1"}', 1.0), ('{"n": NaN}', 0.0)):
        (reward,) = await load("json_schema")([sample(text, label=json.dumps(SCHEMA))])
        assert (reward.value, reward.parts) == (0.0, {"is_json": is_json})


async def test_endless_pattern_search_counts_as_a_wrong_answer() -> None:
    pytest.importorskip("jsonschema")
    schema = {"type": "string", "pattern": "^(a+)+$"}
    endless = json.dumps("a" * 60 + "!")
    reward = load_reward(
        config.RewardSection(kind="json_schema", timeout_seconds=200.0, options={"timeout_seconds": 1})
    )
    assert await values(reward, sample(endless, label=schema), sample('"aa"', label=schema)) == [0.0, 1.0]


@pytest.mark.parametrize(
    ("label", "problem"),
    [
        ({"type": "objct"}, "invalid schema: 'objct'"),
        ({"$ref": "#/nowhere"}, "refers to what is not in it"),
        ("{", "the label is not a JSON Schema"),
        (3, "the label must be a JSON Schema, is '3'"),
    ],
)
async def test_a_schema_that_is_none_fails_its_group(label: Any, problem: str) -> None:
    pytest.importorskip("jsonschema")
    reward = load("json_schema")
    with pytest.raises(RewardError, match=problem):
        await reward([sample("{}", label=label)])
    await reward.close()


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options", "problem"),
    [
        ("gpqa", {"letters": "AAB"}, "letters must be different letters"),
        ("f1", {"metric": "f2"}, "metric must be one of 'f1', 'exact_match'"),
        ("f1", {"extract": "("}, "is not a regular expression"),
        ("random", {"probability": 2.0}, "probability must be >= 0 and <= 1"),
        ("json_schema", {"schema": "/nowhere.json"}, "schema: /nowhere.json: "),
        ("deepscaler", {"processes": 0}, "processes must be > 0"),
    ],
)
def test_options_that_cannot_be_are_refused_in_one_line(kind: str, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        load(kind, **options)
    assert "\n" not in str(caught.value)
