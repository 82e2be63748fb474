"""Rewards: each kind judges as documented, and for any function a group gets either rewards or a reason."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from asyncrl import config
from asyncrl.errors import ConfigError, Outage, RewardError
from asyncrl.rewards.guard import GuardedReward
from asyncrl.rewards.load import load_reward, oddities
from asyncrl.rewards.port import Reward, Sample
from tests.harness.rewards import load, rewards, sample, values

HERE = "tests.unit.rewards.test_rewards"


def patient_math() -> GuardedReward:
    """Math whose limits are beyond any delay on a busy machine."""
    return load_reward(config.RewardSection(kind="math", timeout_seconds=3600.0, options={"timeout_seconds": 600}))


# -- built-in kinds ----------------------------------------------------------------------------------------------------


async def test_math_judges_what_is_equal_and_reads_the_whole_label() -> None:
    pytest.importorskip("math_verify")
    answers = [
        ("The answer is 42.", "42", 1.0),
        ("so we get \\boxed{\\frac{1}{2}}", "0.5", 1.0),
        ("first 3, then 4, so 7", "7", 1.0),
        ("It is 1,000 in all", "1000", 1.0),
        ("$x = 3$", 3, 1.0),
        ("2.5", 2.5, 1.0),
        ("\\boxed{8} or maybe 9", "8", 1.0),
        ("The answer is 41.", "42", 0.0),
        ("I do not know", "42", 0.0),
        ("", "42", 0.0),
        ("The answer is (A).", "A", 1.0),
        ("**Answer: A**", "A", 1.0),
        ("**A**", "A", 1.0),
        ("The answer is A.", "B", 0.0),
        ("A good start: the answer is 5", "A", 0.0),
        ("The answer is Paris.", "Paris", 1.0),
        ("<think>7</think>\n<answer>5</answer>", "5", 1.0),
        ("<answer>7</answer>", "5", 0.0),
        ("答案是5。", "5", 1.0),
        ("so \\boxed 5, not 6", "5", 1.0),
    ]
    labels = [  # and an answer that is right, and one that is wrong
        ("36\\pi", "\\pi \\cdot 36", "36"),
        ("5\\sqrt{3}", "\\sqrt{75}", "5"),
        ("2^{10}", "1024", "2"),
        ("10^{-3}", "0.001", "10"),
        ("1e-05", "0.00001", "1"),
        ("3\\frac{1}{2}", "3.5", "0.5"),
        ("1,2", "2,1", "1.2"),
        ("y = 3x - 7", "y=-7+3x", "7"),
        ("18\\sqrt{3} \\text{ square inches}", "\\sqrt{972}", "18"),
        ("$36\\pi$", "\\pi \\cdot 36", "36"),
        ("\\$1,000", "1000", "1"),
        ("1 000", "1000", "1"),
        ("72 miles per hour", "72", "71"),
        ("2 1/2", "5/2", "2"),
        ("2.5", "2 1/2", "1"),
        ("-2.5", "-2 1/2", "1.5"),
        ("1000/3", "\\frac{1000}{3}", "1 1/3"),
        ("1\\frac{3}{4}", "1 3/4", "\\frac{3}{4}"),
        ("\\frac{1}{2004!}", "\\frac{2005}{2005!}", "\\frac{1}{2006!}"),
        ("1/2004!", "1/2004!", "1/2006!"),
        ("0.0000001", "1e-7", "0.0000002"),
        ("\\frac{\\pi}{10^{20}}", "\\frac{2\\pi}{2 \\cdot 10^{20}}", "\\frac{\\pi}{10^{21}}"),
        ("50\\%", "0.5", "0.05"),
        ("1/3000", "0.000333", "0.000334"),
        ("She has 12 + 5 = 17 eggs in 2 days.\n#### 17", "17", "2"),
        ("The total is 12 + 5 = 17", "17", "12"),
        ("B", "\\textbf{(B)}\\ 5", "\\textbf{(A)}\\ 5"),
        ("\\frac{1}{2}", "½", "2½"),
        ("1½", "1.5", "0.5"),
        ("\\frac{3}{2}", "1½", "½"),
        ("2\\sqrt{3}", "2√3", "2√2"),
        ("x^2", "x²", "x³"),
        ("10^{-3}", "10⁻³", "10³"),
        ("\\infty", "∞", "0"),
        ("90", "90°", "9°"),
        ("5", "５", "６"),
        ("-5", "−5", "5"),
        ("1234", "1\\,234", "1"),
        ("1234", "1 234", "234"),
        ("£5", "5", "4"),
        ("5", "\\text{5 apples}", "\\text{4 apples}"),
    ]
    samples = [sample(text, label=label) for text, label, _ in answers]
    samples += [sample(f"\\boxed{{{answer}}}", label=label) for label, *both in labels for answer in both]
    expected = [value for _, _, value in answers] + [1.0, 0.0] * len(labels)
    assert await values(patient_math(), *samples) == expected


async def test_math_gives_up_on_expressions_that_take_too_long() -> None:
    pytest.importorskip("math_verify")
    section = config.RewardSection(kind="math", options={"timeout_seconds": 3})
    endless = "\\boxed{9^{9^{9^{9^{9}}}}}"
    assert await values(load_reward(section), sample(endless, label="3"), sample("3", label="3")) == [0.0, 1.0]


async def test_a_judge_that_dies_fails_its_group_and_is_replaced() -> None:
    pytest.importorskip("math_verify")
    reward = patient_math()
    await reward([sample("1", label="1")])
    judge = reward._function._judges.idle[0]  # type: ignore[attr-defined]
    judge.kill()
    await judge.wait()
    with pytest.raises(RewardError, match="judge's process"):
        await reward([sample("1", label="1")])
    assert await values(reward, sample("1", label="1")) == [1.0]


async def test_math_without_a_label_says_so() -> None:
    pytest.importorskip("math_verify")
    with pytest.raises(RewardError, match="no label"):
        await load("math")([sample("7")])


async def test_exact_compares_stripped_text() -> None:
    texts = [sample(" yes\n", label="yes"), sample("Yes", label="yes"), sample("yes, sir", label="yes")]
    assert await values(load("exact"), *texts) == [1.0, 0.0, 0.0]
    assert await values(load("exact", ignore_case=True), *texts) == [1.0, 1.0, 0.0]
    assert await values(load("exact", strip=False), *texts) == [0.0, 0.0, 0.0]


async def test_regex_compares_its_group_to_the_label_or_just_matches() -> None:
    texts = [sample("<a>\n7</a>", label="7"), sample("<a>8</a>", label="7"), sample("7", label="7")]
    assert await values(load("regex", pattern="<a>(.*?)</a>"), *texts) == [1.0, 0.0, 0.0]
    assert await values(load("regex", pattern="<a>(.*?)</a>", compare="match"), *texts) == [1.0, 1.0, 0.0]


# -- your own function -------------------------------------------------------------------------------------------------


def per_sample(sample: Sample) -> float:
    return float(len(sample.completion))


async def async_per_sample(sample: Sample) -> Reward:
    return Reward(value=1.0, parts={"length": len(sample.completion)})


def named_samples(samples):  # type: ignore[no-untyped-def]
    return [float(len(samples))] * len(samples)


def annotated_sequence(group: Sequence[Sample]) -> list[float]:
    return [1.0 / len(group)] * len(group)


async def async_list(group: list[Sample]) -> list[dict[str, float]]:
    return [{"a": 0.5, "b": 0.25} for _ in group]


def with_default(sample: Sample, scale: float = 2.0) -> np.float32:
    return np.float32(scale)


class Scorer:
    def __call__(self, sample: Sample) -> float:
        return 3.0


def of_a_dict(sample: dict[str, Any]) -> float:
    return 5.0


def of_a_tuple(batch: tuple[Sample, ...]) -> list[float]:
    return [6.0 for _ in batch]


def of_what_it_cannot_name(batch: "collections.abc.Sequence[nowhere.Sample]") -> list[float]:  # type: ignore[name-defined]  # noqa: F821, UP037
    return [7.0 for _ in batch]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("per_sample", [1.0, 2.0]),
        ("async_per_sample", [1.0, 1.0]),
        ("named_samples", [2.0, 2.0]),
        ("annotated_sequence", [0.5, 0.5]),
        ("async_list", [0.75, 0.75]),
        ("with_default", [2.0, 2.0]),
        ("Scorer", [3.0, 3.0]),
        ("of_a_dict", [5.0, 5.0]),
        ("of_a_tuple", [6.0, 6.0]),
        ("of_what_it_cannot_name", [7.0, 7.0]),
    ],
)
async def test_the_signature_decides_between_sample_and_group(name: str, expected: list[float]) -> None:
    assert await values(load(f"{HERE}:{name}"), sample("a"), sample("bb")) == expected


async def test_sums_and_keeps_a_dict_of_parts() -> None:
    (reward,) = await load(f"{HERE}:async_list")([sample()])
    assert reward == Reward(value=0.75, parts={"a": 0.5, "b": 0.25})


def of_verl(sample: Sample) -> dict[str, Any]:
    return {"score": 1.0, "acc": True, "pred": sample.label}


def of_others(sample: Sample) -> dict[str, Any]:
    return {"reward": np.float32(0.5), "length": 3}


@pytest.mark.parametrize(
    ("pred", "metric"),
    [(5.0, {"pred": 5.0}), ("5", {}), (None, {}), (math.nan, {}), (1e300, {}), (10**400, {}), ([1], {})],
)
async def test_a_score_is_the_reward_and_the_rest_of_the_dict_are_metrics(pred: Any, metric: dict[str, float]) -> None:
    (found,) = await load(f"{HERE}:of_verl")([sample(label=pred)])
    assert found == Reward(value=1.0, parts={"acc": 1.0} | metric)
    (found,) = await load(f"{HERE}:of_others")([sample()])
    assert found == Reward(value=0.5, parts={"length": 3.0})


def of_kinds(sample: Sample) -> dict[str, Any]:
    return {"score": 0.0, "category": "no box"} if sample.label is None else {"right": 0.75, "category": sample.label}


async def test_a_category_of_a_dict_is_a_part_that_does_not_count() -> None:
    kinds = [sample(label=None), sample(label="late"), sample(label=3), sample(label="")]
    assert await load(f"{HERE}:of_kinds")(kinds) == [
        Reward(value=0.0, parts={"category/no box": 1.0}),
        Reward(value=0.75, parts={"right": 0.75, "category/late": 1.0}),
        Reward(value=3.75, parts={"right": 0.75, "category": 3.0}),  # a number is a part like others
        Reward(value=0.75, parts={"right": 0.75}),  # of no category
    ]


def of_easy_r1(sample: Sample) -> dict[str, float]:
    return {"overall": 0.9, "format": 1.0, "accuracy": 0.8}


def of_two_names(sample: Sample) -> dict[str, float]:
    return {"score": 1.0, "reward": sample.label}


async def test_the_names_of_a_whole_reward_of_other_frameworks_are_known() -> None:
    assert (await load(f"{HERE}:of_easy_r1")([sample()])) == [Reward(value=0.9, parts={"format": 1.0, "accuracy": 0.8})]
    assert await values(load(f"{HERE}:of_two_names"), sample(label=1)) == [1.0]
    with pytest.raises(RewardError, match="has score and reward, which differ"):
        await load(f"{HERE}:of_two_names")([sample(label=0.5)])


def of_trl(completions, **kwargs):  # type: ignore[no-untyped-def]
    return [1.0 for _ in completions]


async def of_slime(args, sample, **kwargs):  # type: ignore[no-untyped-def]
    return 1.0


def of_verls_signature(data_source, solution_str, ground_truth, extra_info=None):  # type: ignore[no-untyped-def]
    return 1.0


@pytest.mark.parametrize(("name", "framework"), [("of_trl", "TRL"), ("of_verls_signature", "verl")])
def test_a_function_with_the_arguments_of_another_framework_is_refused_with_its_wrapper(
    name: str, framework: str
) -> None:
    with pytest.raises(
        ConfigError, match=f"as in {framework}; write .* def reward\\(sample\\): return theirs"
    ) as caught:
        load(f"{HERE}:{name}")
    assert "\n" not in str(caught.value)


def writes_by_torch(sample: Sample) -> float:
    torch = pytest.importorskip("torch")
    for array in (sample.trajectory.tokens, sample.parts[0].tokens, sample.prompt_tokens):
        torch.from_numpy(array).fill_(77)
    return 1.0


@pytest.mark.filterwarnings("ignore")
async def test_a_function_that_writes_past_read_only_arrays_changes_only_its_copies() -> None:
    made = sample()
    made = replace(made, parts=(made.trajectory,))
    assert await values(load(f"{HERE}:writes_by_torch"), made) == [1.0]
    assert [*made.trajectory.tokens, *made.prompt_tokens] == [0, 0]


def test_a_function_that_needs_the_main_thread_is_named_before_the_run() -> None:
    (line,) = oddities(config.RewardSection(kind="tests.unit.rewards.uses_math_verify:guarded"))
    assert "guarded: it runs in a thread" in line and "parsing_timeout=None" in line
    assert oddities(config.RewardSection(kind="math")) == []
    assert oddities(config.RewardSection(kind=f"{HERE}:async_per_sample")) == []


# -- functions that fail -----------------------------------------------------------------------------------------------


def raises(sample: Sample) -> float:
    raise KeyError("no such thing\nand more")


def raises_at_random(sample: Sample) -> float:
    if sample.completion == "bad":
        raise ValueError("bad sample")
    return 1.0


def raises_timeout(sample: Sample) -> float:
    raise TimeoutError("the user's own")


def exits(sample: Sample) -> float:
    raise SystemExit(3)


def nan(sample: Sample) -> float:
    return math.nan


def infinite_part(sample: Sample) -> Reward:
    return Reward(value=1.0, parts={"speed": math.inf})


def huge(sample: Sample) -> float:
    return -2e6


def many_parts(sample: Sample) -> dict[str, float]:
    return {str(number): 0.0 for number in range(65)}


def learners_part(sample: Sample) -> dict[str, float]:
    return {"mean": 1.0}


def text(sample: Sample) -> str:
    return "1.0"


def text_part(sample: Sample) -> dict[str, str]:
    return {"a": "0.5"}


def text_value(sample: Sample) -> Reward:
    return Reward(value="0.5")  # type: ignore[arg-type]


def endless(sample: Sample) -> int:
    return int(10**400)


class Unreadable:
    def __float__(self) -> float:
        raise LookupError

    def __repr__(self) -> str:
        raise LookupError


def unreadable(sample: Sample) -> Unreadable:
    return Unreadable()


async def exits_async(sample: Sample) -> float:
    raise SystemExit(3)


def too_few(samples: Sequence[Sample]) -> list[float]:
    return [1.0]


def a_set(samples: Sequence[Sample]) -> set[float]:
    return {0.0, 1.0}


def some_bytes(samples: Sequence[Sample]) -> bytes:
    return b"01"


def nothing(sample: Sample) -> dict[str, float]:
    return {}


def nan_part(sample: Sample) -> dict[str, float]:
    return {"a": 1.0, "b": math.nan}


def one_number(samples: Sequence[Sample]) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("raises", r"raised KeyError: 'no such thing\\nand more' \(test_rewards.py:\d+\)$"),
        ("raises_timeout", "raised TimeoutError: the user's own "),
        ("exits", "raised SystemExit: 3 "),
        ("nan", "the reward is nan$"),
        ("infinite_part", "speed is inf$"),
        ("exits_async", "raised SystemExit: 3"),
        ("huge", r"the reward is -2e\+06, beyond reward.largest = 1e\+06; raise that or scale it$"),
        ("many_parts", "has 65 parts, and 64 are allowed$"),
        ("learners_part", "named 'mean', and reward/mean is a metric of the learner$"),
        ("text", "must be a number, a Reward or a dict of parts, got '1.0'$"),
        ("text_part", "must be a number, a Reward or a dict of parts, got {'a': '0.5'}$"),
        ("text_value", r"must be a number, a Reward or a dict of parts, got Reward\(value='0.5', parts={}\)$"),
        ("endless", r"must be a number, a Reward or a dict of parts, got 10+\.\.\.$"),
        ("unreadable", "must be a number, a Reward or a dict of parts, got an Unreadable$"),
        ("too_few", "returned 1 rewards for 2 samples$"),
        ("a_set", "must return a list of rewards, returned {0.0, 1.0}$"),
        ("some_bytes", "must return a list of rewards, returned b'01'$"),
        ("nothing", "is an empty dict: {}$"),
        ("nan_part", "b is nan$"),
        ("one_number", "must return a list of rewards, returned 1.0$"),
    ],
)
async def test_a_bad_reward_is_one_line_with_its_reason(name: str, reason: str) -> None:
    with pytest.raises(RewardError, match=reason) as caught:
        await load(f"{HERE}:{name}")([sample("good"), sample("bad")])
    assert str(caught.value).startswith(f"reward {HERE}:{name}: ")
    assert "\n" not in str(caught.value)


async def test_an_answer_that_cannot_be_rewarded_costs_its_siblings_nothing() -> None:
    good, bad = await load(f"{HERE}:raises_at_random")([sample("good"), sample("bad")])
    assert good == Reward(value=1.0)
    assert isinstance(bad, RewardError)
    assert not isinstance(bad, Outage)
    assert str(bad).startswith(f"reward {HERE}:raises_at_random: raised ValueError: bad sample (test_rewards.py:")


def nothing_for_bad(samples: Sequence[Sample]) -> list[float | None]:
    return [None if one.completion == "bad" else 1.0 for one in samples]


async def test_a_function_of_a_group_says_none_for_a_sample_without_a_reward() -> None:
    good, bad = await load(f"{HERE}:nothing_for_bad")([sample("good"), sample("bad")])
    assert good == Reward(value=1.0)
    assert isinstance(bad, RewardError)


async def test_only_errors_of_a_service_that_is_away_are_an_outage() -> None:
    with pytest.raises(Outage, match="raised TimeoutError: the user's own"):
        await load(f"{HERE}:raises_timeout")([sample(), sample()])
    with pytest.raises(RewardError) as caught:
        await load(f"{HERE}:raises")([sample(), sample()])
    assert not isinstance(caught.value, Outage)


_release = threading.Event()


def blocks(sample: Sample) -> float:
    _release.wait()
    return 1.0


async def waits(sample: Sample) -> float:
    await asyncio.Event().wait()
    return 1.0


async def cancels_itself(sample: Sample) -> float:
    helper = asyncio.ensure_future(asyncio.Event().wait())
    helper.cancel()
    await helper
    return 1.0


async def cancels_itself_for_all(samples: Sequence[Sample]) -> list[float]:
    return [await cancels_itself(sample) for sample in samples]


@pytest.mark.parametrize("name", ["cancels_itself", "cancels_itself_for_all"])
async def test_a_reward_that_cancels_itself_fails_its_group_at_once(name: str) -> None:
    with pytest.raises(RewardError, match=f"^reward {HERE}:{name}: cancelled itself$"):
        await load(f"{HERE}:{name}")([sample(), sample()])


@pytest.mark.parametrize("name", ["blocks", "waits"])
async def test_hanging_reward_times_out_without_blocking_others(name: str) -> None:
    reward = load(f"{HERE}:{name}", timeout_seconds=0.05)
    for _ in range(3):
        with pytest.raises(RewardError, match="longer than reward.timeout_seconds = 0.05"):
            await reward([sample() for _ in range(16)])
    _release.set()


async def test_a_plain_function_does_not_block_the_loop() -> None:
    (reward,) = await rewards(load(f"{HERE}:thread_name"), [sample()])
    assert reward.parts == {"is_reward_thread": 1.0}


def thread_name(sample: Sample) -> dict[str, float]:
    return {"is_reward_thread": float(threading.current_thread().name == "reward")}


# -- invalid run files -------------------------------------------------------------------------------------------------


def two_arguments(prompt: str, completion: str) -> float:
    return 0.0


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> float:
    return 0.0


COUNT = 1


class CannotBeMade(Scorer):
    def __init__(self) -> None:
        raise OSError("no table\nbut a line more")


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("mth", {}, "did you mean 'math'"),
        ("nothing.here:f", {}, "cannot import 'nothing.here' .*; is it on PYTHONPATH"),
        ("tests.unit.rewards.imports_nothing:f", {}, "cannot import '.*' .No module named 'nothing'.$"),
        (f"{HERE}:per_smaple", {}, "did you mean 'per_sample'"),
        (f"{HERE}:two_arguments", {}, "must take one argument.*it takes prompt, completion"),
        (f"{HERE}:of_slime", {}, "takes args, sample, kwargs; a reward of slime goes without args here"),
        (f"{HERE}:compute_score", {}, "takes .*, as in verl; write a function of one argument around it: def reward"),
        (f"{HERE}:HERE", {}, "is a str, not a function or class$"),
        (f"{HERE}:COUNT", {}, "is an int, not a function or class$"),
        (f"{HERE}:CannotBeMade", {}, "reward.kind: making '.*:CannotBeMade' raised OSError: no table "),
        ("tests.unit.rewards.exits_at_import:score", {}, r"cannot import '.*': it exits \(sys.exit\(0\)\)$"),
        ("tests.unit.rewards.raises_at_import:score", {}, "importing '.*' raised ValueError: two "),
        (f"{HERE}:per_sample", {"scale": 2}, "takes no options, got scale"),
        ("exact", {"stripp": True}, "reward.options: unknown key 'stripp'; did you mean 'strip'"),
        ("exact", {"extract": "("}, "reward.options: extract: '\\(' is not a regular expression"),
        ("regex", {}, "reward.options: missing pattern"),
        ("regex", {"pattern": "["}, "is not a regular expression"),
        ("remote", {"url": "localhost:80"}, "url must start with http"),
        ("math", {"processes": 0}, "processes must be > 0"),
    ],
)
def test_a_reward_that_cannot_be_is_refused_before_the_run(kind: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load(kind, **options)
    assert "\n" not in str(caught.value)
