"""The arithmetic of the GPU benchmarks: arms have the same lengths, and the measured windows and ratios are right."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from asyncrl.engines.generation import Generation
from asyncrl.messages import PromptGroup, SamplingParams, VersionSpan
from asyncrl.policies.batching.packing import pack_for_ranks
from asyncrl.policies.metric import histogram
from benchmarks.gpu import lengths, modes, plans, prefixes, shapes, window
from benchmarks.gpu.estimate import arm_seconds
from benchmarks.gpu.learner import layout_of
from benchmarks.gpu.learner_step import Variant, agree, sequences

LENGTHS = lengths.Lengths(mean=100.0, sigma=1.0, maximum=800, seed=3)


# -- lengths -----------------------------------------------------------------------------------------------------------


async def asked_for(group_id: int, index: int) -> int:
    """The length that ``capped`` asks an engine for."""
    asked: list[int | None] = []

    async def generate(tokens: NDArray[np.int32], *, max_new_tokens: int | None = None) -> Generation:
        asked.append(max_new_tokens)
        return Generation(
            tokens=np.ones(1, np.int32),
            logprobs=np.zeros(1, np.float32),
            version_spans=(VersionSpan(start=0, incarnation=0, policy_version=0),),
            finish_reason="length",
        )

    prompt = PromptGroup(
        group_id=group_id,
        prompt_tokens=np.ones(3, np.int32),
        group_size=8,
        sampling=SamplingParams(max_new_tokens=800),
        metadata=LENGTHS.as_metadata(),
    )
    await lengths.capped(prompt, generate, index=index)
    assert len(asked) == 1
    assert asked[0] is not None
    return asked[0]


async def test_every_arm_meets_the_same_lengths() -> None:
    """The length of a sample depends only on its group and index, not on the worker or the time."""
    places = [(group, index) for group in range(4) for index in range(8)]
    forward = {place: await asked_for(*place) for place in places}
    backward = {place: await asked_for(*place) for place in reversed(places)}
    assert forward == backward
    assert list(forward.values()) == LENGTHS.drawn(groups=4, group_size=8).tolist()
    assert len(set(forward.values())) > 16


def test_lengths_have_the_mean_and_the_cut_that_were_asked_for() -> None:
    drawn = LENGTHS.drawn(groups=2000, group_size=8)
    assert drawn.min() >= 1
    assert drawn.max() == 800
    # Cut at 8 means, a lognormal of sigma 1 keeps 1 - 0.057 + 8 x 0.0048 = 98 % of its mean.
    assert drawn.mean() == pytest.approx(98, rel=0.03)


def test_a_histogram_of_octaves_gives_the_quantiles_back() -> None:
    drawn = LENGTHS.drawn(groups=500, group_size=8)
    found = lengths.summary(lengths.merged([dataclasses.asdict(histogram(drawn.tolist()))]), drawn)
    assert found["mean"] == pytest.approx(drawn.mean())
    assert found["p99"] == pytest.approx(np.quantile(drawn, 0.99))
    assert found["max"] == drawn.max()


def test_a_missing_tail_is_seen() -> None:
    drawn = LENGTHS.drawn(groups=500, group_size=8)
    short = dataclasses.asdict(histogram(drawn[drawn < 128].tolist()))
    found = lengths.summary(lengths.merged([short, short]), drawn)
    assert found["max"] < 128
    assert found["count"] == 2 * (drawn < 128).sum()
    assert lengths.summary({}, drawn) == {"count": 0}


# -- windows -----------------------------------------------------------------------------------------------------------


def step(number: int, *, time: float, tokens: int = 100, **changes: Any) -> dict[str, Any]:
    return {
        "step": number,
        "time": time,
        "learner/wait_seconds": 1.0,
        "learner/step_seconds": 2.5,
        "staleness/histogram": {"edges": [0, 1, 2, 3], "counts": [tokens - 10, 10, 0]},
        "staleness/mean": 0.1,
        "staleness/max": 1.0,
        "staleness/dropped_groups": 0.0,
        "staleness/failed_groups": 0.0,
        "weights/publish_seconds": 0.5,
        **changes,
    }


def sample(time: float, *running: int, loads: int = 0, pause: float = 0.0, **changes: Any) -> dict[str, Any]:
    numbers = {"weights/loads": loads, "weights/pause_seconds": pause, "rollout/tokens_per_second": 50.0}
    return {
        "time": time,
        "published": loads,
        "engines": [{"running": count, "waiting": 0, "version": f"0:{loads}"} for count in running],
        "actors": {"w0": {"role": "rollout-worker", "version": loads, "waits_for": "", "numbers": numbers}},
        **changes,
    }


def test_a_window_is_from_the_end_of_the_warm_up_to_the_last_step() -> None:
    rows = [step(1, time=100.0, tokens=999), step(2, time=104.0), step(3, time=110.0, tokens=300)]
    found = window.measure(rows, [], warmup=1)
    assert found["tokens_per_second"] == 400 / 10  # the first step is warm-up
    assert found["learner_idle"] == 2 / 10
    assert found["learner_overhead"] == pytest.approx(1 - 7 / 10)
    assert found["staleness_max"] == 1
    assert (found["steps"], found["window_seconds"], found["step_seconds"]) == (2, 10.0, 5.0)


def test_groups_dropped_in_the_warm_up_do_not_count() -> None:
    rows = [step(n, time=float(n)) | {"staleness/dropped_groups": dropped} for n, dropped in ((1, 5.0), (2, 7.0))]
    assert window.measure(rows, [], warmup=1)["dropped_groups"] == 2


def test_nothing_behind_the_warm_up_is_no_measurement() -> None:
    with pytest.raises(ValueError, match="2 steps, of which 2 are warm-up"):
        window.measure([step(1, time=1.0), step(2, time=2.0)], [], warmup=2)


def test_a_window_ends_when_both_seconds_and_steps_are_enough() -> None:
    rule = window.Rule(warmup=2, seconds=10.0, min_steps=2)
    rows = [step(n, time=4.0 * n) for n in range(1, 7)]
    assert [rule.is_enough(rows[:count]) for count in range(7)] == [False] * 5 + [True, True]  # 20 - 8 = 12 s
    slow = [step(n, time=40.0 * n) for n in range(1, 5)]
    assert [rule.is_enough(slow[:count]) for count in range(5)] == [False] * 4 + [True]  # two steps though one is 40 s


def test_engines_are_idle_when_nothing_runs_in_them() -> None:
    found = window.engines(
        [sample(1.0, 4, 0), sample(2.0, 2, 6), sample(3.0, 0, 0), {**sample(4.0), "engines": [None]}]
    )
    assert found["engine_idle"] == 3 / 6
    assert found["engine_running"] == 12 / 6
    assert found["generated_tokens_per_second"] == 50


def test_each_load_counts_once() -> None:
    looks = [(1.0, 3, 0.2), (1.5, 3, 0.2), (2.0, 4, 0.1), (2.5, 4, 0.1), (3.0, 5, 0.3)]
    found = window.pauses([sample(time, 1, loads=loads, pause=pause) for time, loads, pause in looks])
    assert found["loads"] == 2  # what was loaded before the window is not its own
    assert found["pause_p50"] == pytest.approx(0.2)
    assert found["pause_p99"] == pytest.approx(0.298)


# -- arms against each other -------------------------------------------------------------------------------------------


def row(name: str, split: str, speed: float, **changes: Any) -> dict[str, Any]:
    found = {"arm": name, "split": split, "name": f"{name}-{split}", "tokens_per_second": speed, "staleness_max": 0}
    return found | {"max_staleness": 0 if name == "sync" else 4} | FREE | changes


FREE = {"steps": 2, "publish_seconds": 1.0, "load_seconds": 1.5, "window_seconds": 10.0}


def test_arms_are_compared_at_their_best_splits_and_losses_are_said() -> None:
    rows = [
        row("async", "2+2", 80.0),
        row("async", "1+3", 60.0),
        row("sync", "2+2", 20.0),
        row("sync", "1+3", 40.0),
        row("one_step_off", "2+2", 100.0),
        {"arm": "async_drain", "split": "2+2", "error": "learner ended with exit code 1"},
    ]
    sync, one_step_off = window.ratios(rows)
    assert "async 2+2 / sync" in sync
    assert "2.00x" in sync
    assert "LOSES" not in sync
    assert "0.80x" in one_step_off
    assert one_step_off.endswith("LOSES")


def test_weights_that_move_in_no_time_take_their_seconds_out_of_the_window() -> None:
    # 400 tokens in 10 s, of which 2 x (1 + 1.5) s went by while the weights moved: 400 in 5 s.
    assert window.with_free_weights(row("sync", "2+2", 40.0)) == 80


def test_a_broken_staleness_bound_is_reported() -> None:
    assert list(window.broken_promises([row("async", "2+2", 1.0, staleness_max=4)])) == []
    assert list(window.broken_promises([row("async", "2+2", 1.0, staleness_max=5)])) == [
        "async-2+2: staleness 5 over the bound 4"
    ]


def test_the_most_telling_arms_run_first() -> None:
    found = plans.plans(list(plans.KINDS), splits=["2+2", "1+3"], gpus=4)
    assert [(plan.arm, plan.split) for plan in found[:3]] == [
        ("async", "2+2"),
        ("sync_colocated", "4"),
        ("one_step_off", "2+2"),
    ]
    behind = found[len(plans.KINDS) :]
    assert {plan.split for plan in behind} == {"1+3"}
    assert not any(plan.is_colocated for plan in behind)


def test_learner_and_engines_share_gpus_only_when_colocated() -> None:
    apart, together = plans.parse_arm("async@1+3", gpus=4), plans.parse_arm("sync_colocated", gpus=4)
    assert (apart.learner_gpus, apart.engine_gpus) == ((0,), (1, 2, 3))
    assert together.learner_gpus == together.engine_gpus == (0, 1, 2, 3)
    fewer = plans.parse_arm("async@1+2", gpus=8)
    assert (fewer.learner_gpus, fewer.engine_gpus) == ((0,), (6, 7))


@pytest.mark.parametrize("text", ["async", "async@2+3", "async@0+4", "fast@2+2", "async@two+two"])
def test_a_split_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=text.partition("@")[0]):
        plans.parse_arm(text, gpus=4)


def test_with_a_barrier_every_engine_gets_an_even_part_of_the_batch() -> None:
    assert plans.parse_arm("sync@1+3", gpus=4).running(64, 8, of_async=256) == 22 * 8
    assert plans.parse_arm("async@1+3", gpus=4).running(64, 8, of_async=256) == 256


def test_an_estimate_counts_whole_steps() -> None:
    # start 15, one step of warm-up, then ceil(20 / 8) = 3 steps
    assert arm_seconds(step_seconds=8.0, warmup=1, window_seconds=20.0) == 15 + 4 * 8


def test_an_estimate_of_a_shape_that_was_not_measured_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        modes.arguments(["--estimate", "--shape", "30B-A3B:48"])
    assert "--estimate: no speeds of 30B-A3B:48 were measured, only of tiny, 0.6B, " in capsys.readouterr().err


# -- layouts of a learner ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "name", "ranks"),
    [
        ("1x1", "dp1tp1", 1),
        ("2x1", "dp2tp1", 2),
        ("cp2", "dp1tp1cp2", 2),
        ("pp2-tp2", "dp1tp2pp2", 4),
        ("ep2", "dp2tp1ep2", 2),
        ("dp4-ep2", "dp4tp1ep2", 4),
    ],
)
def test_a_layout_is_named_as_it_was_asked_for(word: str, name: str, ranks: int) -> None:
    variant = Variant(shape="tiny", tokens=64, **layout_of(word))
    assert variant.name.removesuffix("-overlap") == f"tiny-64x1-{name}-none"
    assert variant.is_overlapped == variant.name.endswith("-overlap") == (variant.tensor_parallel > 1)
    assert variant.layout.ranks == ranks
    assert variant.layout.is_sequence_parallel == (variant.tensor_parallel > 1)


def test_an_unknown_layout_is_refused() -> None:
    with pytest.raises(ValueError, match="qp is none of dp, tp, cp, pp, ep"):
        layout_of("qp2")


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
def test_layouts_whose_ranks_hold_parts_agree_and_resume_each_other(tmp_path: Path) -> None:
    folder = shapes.make_model(shapes.SHAPES["tiny"], tmp_path, dtype="float32")
    found = agree(
        folder, device="cpu", dtype="float32", tokens=512, layouts=[layout_of(word) for word in ("1x1", "1x2")]
    )
    (row,) = found["agree"]
    assert row["worst_metric_relative"] < 1e-4
    assert (row["weights_mean_over_moved"], row["resumed_mean_over_moved"]) == pytest.approx((0, 0), abs=1e-3)


def test_a_sequence_that_fills_the_row_is_alone_in_it() -> None:
    (alone,) = sequences(Variant(shape="tiny", tokens=4096, length=4096), vocabulary=100, seed=0)
    assert 0.97 * 4096 < len(alone) <= 4096
    assert len(sequences(Variant(shape="tiny", tokens=4096, length=512), vocabulary=100, seed=0)) > 4


# -- shapes and pictures -----------------------------------------------------------------------------------------------


def test_shapes_have_the_parameters_of_the_models_they_are_named_for() -> None:
    found = {name: round(shapes.num_parameters(shape) / 1e6) for name, shape in shapes.SHAPES.items()}
    assert (found["0.6B"], found["1.7B"], found["4B"]) == (596, 1721, 4022)
    assert (found["32B"], found["30B-A3B:48"], found["235B-A22B:94"]) == (32762, 30532, 235094)


def test_a_model_too_large_for_one_file_has_one_for_each_layer() -> None:
    shape = shapes.SHAPES["tiny-moe"]
    (whole,) = shapes.split(shape, most_parameters=1e9).values()
    files = shapes.split(shape, most_parameters=1e3)
    assert [len(names) for names in files.values()] == [3, *[8 + 1 + 3 * 8] * 2]
    assert {name: size for names in files.values() for name, size in names.items()} == whole


def test_a_made_model_has_the_tensors_that_hugging_face_expects(tmp_path: Path) -> None:
    import safetensors.torch
    import transformers

    folder = shapes.make_model(shapes.SHAPES["tiny"], tmp_path, dtype="float32")
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    expected = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == expected


# -- shared prefixes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "whole", "computed"),
    # A prompt of 80 tokens and eight answers of 5; of an agent a prompt of 20 and eight turns of 5 + 4, of which the
    # history keeps 2 + 4: turn n sees 20 + 6 n tokens, and four agents answer one prompt.
    [("prompts of 8k", 8 * 85, 80 + 8 * 5), ("agents", 4 * (8 * 25 + 6 * 28), 20 + 4 * (8 * 5 + 7 * 6))],
)
def test_cases_of_shared_prefixes_share_what_they_say(case: str, whole: int, computed: int) -> None:
    made = prefixes.batch(prefixes.CASES[case], prompts=1, scale=0.01, vocabulary=100_000, seed=0)
    ((row,),) = pack_for_ranks(made, ranks=1, max_tokens=4096, shares_prefixes=True)
    answers = sum(int(one.response_mask.sum()) for one in made)
    spread = answers - 5 * len(made)  # answers are 2 to 8 tokens long
    assert row.num_tokens == whole + spread
    assert row.num_computed == computed + spread
