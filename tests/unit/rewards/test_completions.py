"""What a reward reads: what was sampled, with its marks; the built-in ones judge the answer and not the thought."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from asyncrl import config
from asyncrl.messages import Trajectory, VersionSpan
from asyncrl.rewards.answers import after_thinking, ends_thinking, marked
from asyncrl.rewards.completions import CompletionReader
from asyncrl.rewards.load import load_reward
from asyncrl.rewards.port import Reward, Sample
from tests.harness.rewards import load, sample, values

HARMONY = "<|channel|>analysis<|message|>Perhaps \\boxed{7}, so A.<|end|><|start|>assistant<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("5", "5"),
        ("<think>7?</think>5", "5"),
        ("7?</think>5", "5"),
        ("<think>a</think>b<think>c</think>d", "d"),
        ("[THINK]7?[/THINK]5", "5"),
        ("<|START_THINKING|>7?<|END_THINKING|><|START_RESPONSE|>5<|END_RESPONSE|>", "5"),
        ("<seed:think>7?</seed:think>5", "5"),
        ("◁think▷7?◁/think▷5", "5"),
        ("<|channel>thought\n7?<channel|>5", "5"),
        ("<reasoning>\n7?\n</reasoning>5", "5"),
        (HARMONY + "5", "5"),
        (HARMONY + "5<|return|>", "5"),
        (HARMONY.replace("final", "final <|constrain|>json") + '{"x": 1}', '{"x": 1}'),
        ("<|channel|>analysis<|message|>so it is 7", ""),
        ("<|channel|>final<|message|>5<|end|><|start|>assistant<|channel|>analysis<|message|>or 7", ""),
        ("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary to=f<|message|>{}<|call|>", ""),
        ("<|channel|>final", ""),
        ("<think>so it is 7", ""),
        ("  <think>\nso it is 7", ""),
        ("<think>a</think>b\n<think>\nso it is 7", ""),
        ("A thought is between <think> and </think", "A thought is between <think> and </think"),
        ("5<|im_end|>\n<|im_start|>user", "5\nuser"),
    ],
)
def test_the_answer_is_what_follows_the_last_thought(text: str, answer: str) -> None:
    assert after_thinking(text) == answer


@pytest.mark.parametrize("prompt", ["<|im_start|>assistant\n<think>\n", "Assistant: <think>", "[THINK]"])
def test_a_thought_that_the_prompt_opens_and_nothing_ends_has_no_answer(prompt: str) -> None:
    assert after_thinking("The answer is A", prompt=prompt) == ""
    assert after_thinking("Or B?</think>The answer is A", prompt=prompt) == "The answer is A"
    assert after_thinking("The answer is A", prompt=prompt + "\n\n</think>\n\n") == "The answer is A"
    assert after_thinking("The answer is A", prompt="Put thoughts between <think> and </think>. Q?") != ""


def test_deepscaler_knows_every_end_of_a_thought() -> None:
    assert ends_thinking("a</think>b") and ends_thinking(HARMONY) and ends_thinking("[THINK]a[/THINK]b")
    assert not ends_thinking("<think>a") and not ends_thinking("<|channel|>analysis<|message|>a")


@pytest.mark.parametrize("opened", [HARMONY, "<think>Perhaps \\boxed{7}. The answer is A. Answer: 7</think>"])
async def test_built_in_rewards_judge_the_answer_and_not_the_thought(opened: str) -> None:
    for kind, label, answer, wrong in (
        ("gpqa", "B", "B", "A"),
        ("exact", "5", "5", "7"),
        ("dapo", "5", "Answer: 5", "7"),
        ("f1", "5", "5", "7"),
        ("json_schema", {"type": "object"}, '{"x": 1}', {"type": "string"}),
    ):
        reward = load(kind)
        found = await values(reward, sample(opened + answer, label=label), sample(opened + answer, label=label))
        assert found == [1.0, 1.0], kind
        assert (await values(load(kind), sample(opened + answer, label=wrong)))[0] <= 0.0, kind


async def test_math_judges_the_answer_and_not_the_thought() -> None:
    pytest.importorskip("math_verify")
    reward = load_reward(config.RewardSection(kind="math", timeout_seconds=3600.0, options={"timeout_seconds": 600}))
    texts = [HARMONY + "The result is 5.", "<think>First \\boxed{7}, no.</think>The result is 5.", "<think>\\boxed{5}"]
    found = await values(reward, *(sample(text, label=label) for text in texts for label in ("5", "7")))
    assert found == [1.0, 0.0, 1.0, 0.0, 0.0, 0.0]


# -- from tokens -------------------------------------------------------------------------------------------------------


class Token:
    def __init__(self, text: str, special: bool) -> None:
        self.text, self.special = text, special

    def __str__(self) -> str:
        return self.text


class Letters:
    """A tokenizer whose tokens below 200 are letters."""

    special = ("<eos>", "<|im_end|>", "<think>", "</think>", "<answer>", "</answer>")
    eos_token_id = 200

    def __init__(self) -> None:
        self.added_tokens_decoder = {200 + n: Token(text, True) for n, text in enumerate(self.special)}
        self.added_tokens_decoder[250] = Token("<tool>", False)

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = True) -> str:
        texts = []
        for token in map(int, token_ids):
            added = self.added_tokens_decoder.get(token)
            if added is None:
                texts.append(chr(token))
            elif not (added.special and skip_special_tokens):
                texts.append(str(added))
        return "".join(texts)


def read(tokens: Sequence[int | str], *, environment: slice = slice(0, 0), finish_reason: str = "stop") -> Any:
    ids = np.array([ord(one) if isinstance(one, str) else one for one in tokens], np.int32)
    mask = np.ones(len(ids), np.bool_)
    mask[environment] = False
    trajectory = Trajectory(
        tokens=ids,
        response_mask=mask,
        behavior_logprobs=np.zeros(len(ids), np.float32),
        version_spans=(VersionSpan(start=0, incarnation=0, policy_version=0),),
        finish_reason=finish_reason,
    )
    return CompletionReader(Letters()).read(trajectory)


@pytest.mark.parametrize(
    ("tokens", "kept", "plain"),
    [
        (["5", 200], "5", "5"),
        (["5", 201], "5", "5"),
        ([202, "7", 203, "5", 200], "<think>7</think>5", "75"),
        ([202, "7", 203, "5", 201], "<think>7</think>5", "75"),
        ([202, "7", 203, 200], "<think>7</think>", "7"),
        ([204, "5", 205], "<answer>5</answer>", "5"),
        (["5", 201, "6", 200], "5<|im_end|>6", "56"),
        ([250, "5", 200], "<tool>5", "<tool>5"),
    ],
)
def test_special_tokens_that_were_sampled_are_kept_but_those_that_end_an_answer(
    tokens: list[int | str], kept: str, plain: str
) -> None:
    assert read(tokens) == (kept, plain)


def test_a_last_mark_of_a_cut_answer_is_kept() -> None:
    assert read([202, "7", 203], finish_reason="length") == ("<think>7</think>", "7")
    assert read(["7", 202], finish_reason="length") == ("7<think>", "7")


def test_special_tokens_of_an_environment_are_left_out() -> None:
    assert read([202, "a", 203, "b", 201, "c", 202, "d", 200], environment=slice(5, 7))[0] == (
        "<think>a</think>b<|im_end|>cd"
    )


def test_a_tokenizer_without_added_tokens_reads_as_before() -> None:
    class Plain:
        def decode(self, token_ids: Any, *, skip_special_tokens: bool = True) -> str:
            return "text" if skip_special_tokens else "other"

    one = sample().trajectory
    assert CompletionReader(Plain()).read(one) == ("text", "text")


def shows(sample: Sample) -> dict[str, float]:
    return {"has_mark": float("</think>" in sample.completion), "answer_is_5": float(sample.answer == "5")}


async def test_a_function_reads_marks_or_none_by_choice() -> None:
    made = Sample(
        prompt="",
        completion="<think>7</think>5",
        label=None,
        metadata={},
        trajectory=sample().trajectory,
        prompt_tokens=np.zeros(1, np.int32),
        plain="75",
    )
    for keeps in (True, False):  # the answer is found by the marks that were sampled
        section = config.RewardSection(kind=f"{__name__}:shows", keep_special_tokens=keeps)
        (found,) = await load_reward(section)([made])
        assert isinstance(found, Reward) and found.parts == {"has_mark": float(keeps), "answer_is_5": 1.0}


async def test_a_thought_that_special_marks_end_has_an_answer_without_them_too() -> None:
    """A prompt that opens the thought, and marks that are left out: every answer would be empty."""
    made = replace(sample("7[/THINK]5", label="5", prompt="[THINK]"), plain="75")
    section = config.RewardSection(kind="exact", keep_special_tokens=False)
    assert await values(load_reward(section), made) == [1.0]


@pytest.mark.parametrize(
    "opened", ["", "<think>Is it <answer>A</answer>?</think>\n", "Between <answer> and </answer>: "]
)
async def test_an_answer_between_answer_marks_is_read_without_them(opened: str) -> None:
    for kind, label, answer in (
        ("exact", "5", "5"),
        ("exact", "<answer>5</answer>", "5"),
        ("f1", "Paris", "Paris"),
        ("rouge", "Paris is nice", "Paris is nice"),
        ("gpqa", "B", "B"),
        ("dapo", "5", "Answer: 5"),
        ("json_schema", {"type": "object", "required": ["a"]}, '{"a": 1}'),
    ):
        if kind == "exact" and opened.startswith("Between") and "<" in label:
            continue  # the label is the whole answer
        text = f"{opened}<answer>\n{answer}\n</answer>" if label != "<answer>5</answer>" else f"{opened}{label}"
        assert await values(load(kind), sample(text, label=label)) == [1.0], kind
    assert marked("<answer>5") == "5" and marked("5 <answer></answer>") == "5 <answer></answer>"
