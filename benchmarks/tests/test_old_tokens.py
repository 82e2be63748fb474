"""The benchmark of old tokens: its runs, its guards against numbers worked by hand, and the drift alarm."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.config.metrics import MetricsSection
from asyncrl.config.staleness_bound import LARGEST_SHOWN, MOST_LOST, bound_for
from asyncrl.errors import ConfigError
from benchmarks.gpu.rows import keep, read
from benchmarks.old_tokens import alarm, page, seconds, table, tasks
from benchmarks.old_tokens.__main__ import main
from benchmarks.old_tokens.candidates import ESTR, SAT, SequenceGate, brace, damp_repeated
from benchmarks.old_tokens.cells import Cell, share_of_rate
from benchmarks.old_tokens.critic import Critic
from benchmarks.old_tokens.decoder import Decoder
from benchmarks.old_tokens.guards import GUARDS
from benchmarks.old_tokens.verdict import MATTERS, cells, in_training, mean_of, safe_product

RECORDED = Path("docs/results/gpu")
SMALL = ["--tasks", "search", "--rates", "0.01", "--seeds", "0", "--steps", "4", "--groups", "2", "--group-size", "4"]


def logs(*values: float, grad: bool = False) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).log().requires_grad_(grad)


# -- runs --------------------------------------------------------------------------------------------------------------


def test_a_stopped_table_goes_on_where_it_was(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    main([*SMALL, "--staleness", "0", "--guards", "--json", str(file)])
    first = file.read_text()
    main([*SMALL, "--staleness", "0", "2", "--guards", "gac", "estr", "--guard-rate", "0.01", "--json", str(file)])
    assert file.read_text().startswith(first)
    assert [(row["staleness"], row["guard"]) for row in read(file)] == [(0, "tis"), (2, "tis"), (4, "gac"), (4, "estr")]


def test_a_row_that_was_torn_is_made_again_and_harms_no_other(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    for number in range(3):
        keep({"number": number}, file)
    file.write_bytes(file.read_bytes()[:-4])
    assert [row["number"] for row in read(file)] == [0, 1]
    keep({"number": 2}, file)
    assert [row["number"] for row in read(file)] == [0, 1, 2]


def test_what_is_asked_for_twice_runs_once(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    again = ["--rates", "0.01", "1e-2", "--staleness", "0", "0", "--seeds", "0", "0", "--guards", "--steps", "2"]
    main([*SMALL, *again, "--json", str(file)])
    assert len(read(file)) == 1


def test_a_line_that_is_no_row_is_named(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"number": 0}\n{"num{"number": 1}\n')  # one was torn, and another file was appended
    with pytest.raises(ConfigError, match=r"rows.jsonl:2: no whole row; delete the line, and its run is made again"):
        read(file)


def test_runs_of_other_sizes_or_of_another_model_are_not_added_to_a_file(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    made = row("search", 0.01, 0, 0.5) | {"model": "tiny", "groups": 2, "group_size": 4}
    keep(made, file)
    with pytest.raises(ConfigError, match=r"its runs have groups 2, not 3: use another file"):
        main([*SMALL, "--groups", "3", "--json", str(file)])
    with pytest.raises(ConfigError, match=r"its runs have model tiny, not smollm2"):
        main([*SMALL, "--tasks", "sums", "--model", "smollm2", "--guards", "--json", str(file)])
    with pytest.raises(ConfigError, match=r"a row without 'task' is no run of old_tokens: use another file"):
        main([*SMALL, "--json", "docs/results/gpu/learning.jsonl"])


def test_a_run_that_was_written_twice_counts_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [row("search", 0.01, age, 0.5 + 0.1 * seed, seed=seed) for seed in (0, 1) for age in (0, 2)]
    rows += [row("search", 0.01, 2, 0.7 + 0.1 * seed, seed=seed, guard="gac") for seed in (0, 1)]
    tables = []
    for one in (*rows, *rows[-1:]):
        keep(one, file)
        assert main(["--print", "--json", str(file)]) == 0
        tables.append(capsys.readouterr().out)
    assert tables[-1] == tables[-2] != tables[-3]


@pytest.mark.parametrize("share", ["2/2", "0/0", "-1/2", "1", "a/b"])
def test_a_share_that_is_none_is_refused(share: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*SMALL, f"--share={share}"])
    assert "argument --share: invalid" in capsys.readouterr().err


def test_an_arm_does_not_depend_on_the_arms_beside_it(tmp_path: Path) -> None:
    alone, beside = tmp_path / "alone.jsonl", tmp_path / "beside.jsonl"
    main([*SMALL, "--staleness", "2", "--guards", "--json", str(alone)])
    main([*SMALL, "--staleness", "0", "2", "--guards", "none", "--json", str(beside)])
    (wanted,) = read(alone)
    (found,) = table.select(read(beside), staleness=2, guard="tis")
    assert found["curve"] == wanted["curve"]
    assert found["metrics"]["offpolicy/k3"] == pytest.approx(wanted["metrics"]["offpolicy/k3"], rel=1e-2, abs=1e-6)


def test_the_products_backend_trains_tokens_that_are_as_old_as_the_cell_says(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    main([*SMALL, "--product", "--staleness", "0", "2", "--guards", "--json", str(file)])
    fresh, old = (table.select(read(file), staleness=age)[0]["metrics"]["offpolicy/k3"] for age in (0, 2))
    assert max(fresh) < 1e-6
    assert old[0] < 1e-6 < min(old[1:])  # the first weights train what they sampled; no later ones do


def test_a_guard_that_would_do_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="'gac' changes gradients, which only --backend reference shows"):
        main([*SMALL, "--product", "--backend", "megatron", "--guards", "gac"])
    with pytest.raises(ConfigError, match="'brace' is for the tiny runs alone"):
        main([*SMALL, "--product", "--guards", "brace"])


def test_the_sampler_reports_the_logprobs_that_transformers_computes(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = tasks.make_model(tmp_path / "model", seed=0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    decoder = Decoder(folder, device=torch.device("cpu"), dtype=torch.float32, graphs=True)
    decoder.load(model.state_dict().items())
    contexts = [[4, 5, 6, 7], [9], [4, 5, 6, 7]]
    batch = decoder.start(contexts, most=3)
    for _ in range(3):
        batch.sample(torch.Generator().manual_seed(0))
        contexts = [[*one, token] for one, token in zip(contexts, batch.tokens.tolist(), strict=True)]
        for row, context in enumerate(contexts):
            with torch.no_grad():
                distribution = torch.log_softmax(model(torch.tensor([context[:-1]])).logits[0, -1], -1)
            assert float(batch.logprobs[row]) == pytest.approx(float(distribution[context[-1]]), abs=1e-5)
            assert float(batch.entropies[row]) == pytest.approx(
                float(-(distribution.exp() * distribution).sum()), abs=1e-5
            )


def test_a_rate_falls_with_the_age_of_the_tokens_that_are_there() -> None:
    cell = Cell(task="search", rate=1.0, staleness=4, guard="rate_1", seed=0, steps=9)
    assert [share_of_rate(cell, step=step) for step in (0, 1, 2, 8)] == [1.0, 1.0, 0.5, 0.25]
    assert [share_of_rate(cell, step=step, warm_up=4) for step in (0, 1, 8)] == [0.25, 0.5, 0.25]


def test_what_is_long_is_not_trained_where_the_longest_groups_are_dropped(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    arms = ["--staleness", "--guards", "drop_longest", "drop_any", "--guard-staleness", "0", "--guard-rate", "0.01"]
    main([*SMALL, *arms, "--groups", "8", "--json", str(file)])
    longest, any_ = (one["metrics"] for one in read(file))
    assert all(of < its for of, its in zip(longest["length_trained"], longest["length"], strict=True))
    assert longest["length"][0] == any_["length"][0]  # the first weights sampled both
    assert longest["length_trained"][0] < any_["length_trained"][0]


# -- guards ------------------------------------------------------------------------------------------------------------


def test_the_sequence_gate_keeps_what_has_moved_little() -> None:
    """d(0.5, 0.5) = 0; d(0.5, 0.6) = .5 log(.5/.6) + .5 log(.5/.4) = 0.020411."""
    logprobs, behavior = logs(0.5, 0.6, 0.5, grad=True), logs(0.5, 0.5, 0.5)
    sequence, advantages = torch.tensor([0, 0, 1]), torch.tensor([2.0, 2.0, -1.0])
    loss, masked = SequenceGate(delta=0.0103).formula(logprobs, behavior, advantages, sequence, 2)  # mean 0.010206
    assert not masked.any()
    assert loss.tolist() == pytest.approx([-2 * math.log(0.5), -1.2 * 2 * math.log(0.6), math.log(0.5)])
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    assert gradient.tolist() == pytest.approx([-2.0, -2.4, 1.0])  # -r A
    loss, masked = SequenceGate(delta=0.0101).formula(logprobs, behavior, advantages, sequence, 2)
    assert masked.tolist() == [True, True, False]
    assert loss[:2].tolist() == [0.0, 0.0]


def test_estr_measures_a_move_by_the_entropy() -> None:
    """(log 1.1)^2 = 0.009084; / (0.09 + 0.01) = 0.0908, / (0.02 + 0.01) = 0.3028."""
    logprobs, behavior = logs(0.55, 0.55, 0.65, grad=True), logs(0.5, 0.5, 0.5)
    entropies = torch.tensor([0.09, 0.02, 3.0])
    loss, masked = ESTR(tau=0.25).formula(logprobs, behavior, torch.ones(3), {"behavior_entropy": entropies})
    assert masked.tolist() == [False, True, True]  # the last by PPO's clip at 1.2
    assert loss.tolist() == pytest.approx([-1.1, 0.0, -1.2])
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    assert gradient.tolist() == pytest.approx([-1.1, 0.0, 0.0])


def test_sat_narrows_the_clip_only_in_the_tail_and_on_the_side_of_the_drift() -> None:
    """|d| = .05, .05, .15; their median q = .05; k = 1 / (1 + (.1 / .05)^2) = .2, so the clip is 1 + .2 x .2."""
    moves = torch.tensor([0.05, -0.05, 0.15], dtype=torch.float64)
    logprobs = (logs(0.5, 0.5, 0.5) + moves).requires_grad_()
    loss, clipped = SAT(quantile=0.5).formula(logprobs, logs(0.5, 0.5, 0.5), torch.ones(3))
    assert clipped.tolist() == [False, False, True]  # PPO would keep it: exp(.15) = 1.16
    assert loss.tolist() == pytest.approx([-math.exp(0.05), -math.exp(-0.05), -1.04])
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    assert gradient.tolist() == pytest.approx([-math.exp(0.05), -math.exp(-0.05), 0.0])


def test_gac_removes_what_repeats_the_step_before() -> None:
    before = torch.tensor([[1.0, 0.0]] * 3)
    now = torch.tensor([[0.0, 1.0], [1.0, 2.0], [1.0, 0.1]])  # cosines 0, .447, .995
    assert damp_repeated(now, before).tolist() == [[0.0, 1.0], [0.0, 2.0], [0.0, 0.0]]
    assert damp_repeated(now, before, kept=0.5)[1].tolist() == [0.5, 2.0]


def test_brace_corrects_values_by_clipped_ratios() -> None:
    """Answers of two tokens and of one. V = .5, .25, V_2 = .125; r = 1.5, 1: rho = 1.2, 1, c = 1.1, 1; R = 1.
    V*_2 = 1; V*_1 = .25 + (.125 - .25) + (1 - .125) = 1; V*_0 = .5 + 1.2 (.25 - .5) + 1.1 (1 - .25) = 1.025."""
    given = {
        "values": np.array([0.5, 0.25, 0.5]),
        "final_values": np.array([0.125, 0.0]),
        "rewards": np.array([1.0, 0.0]),
        "sequence": np.array([0, 0, 1]),
    }
    advantages, targets = brace(**given, ratios=np.array([1.5, 1.0, 0.5]))
    assert targets.tolist() == pytest.approx([1.025, 1.0, 0.25])  # .5 + .5 (0 - .5) + .5 (0 - 0)
    assert advantages.tolist() == pytest.approx([0.5, 0.75, -0.5])
    advantages, targets = brace(**given, ratios=np.ones(3))  # on policy: what is left of the reward, as GAE
    assert targets.tolist() == pytest.approx([1.0, 1.0, 0.0])


def test_a_critic_learns_what_answers_are_worth() -> None:
    critic = Critic(GUARDS["critic"], inputs=4, rate=0.05, seed=0)
    states, ends = torch.tensor([[0], [1]]), torch.tensor([[2], [3]])
    for _ in range(60):
        made = critic.learn(states, ends, np.ones(2), np.array([1.0, 0.0]), np.array([0, 1]))
    assert np.abs(critic._values(states).detach().numpy() - [1.0, 0.0]).max() < 0.2
    assert made[0] > 0 > made[1]  # whitened


# -- tasks and the alarm -----------------------------------------------------------------------------------------------


def test_an_agent_that_halves_finds_seven_of_eight_digits() -> None:
    def search(problem: tasks.Problem) -> float:
        low, high, said = 0, 6, list[str]()
        while True:
            guess = (low + high) // 2
            said.append(str(guess))
            told = task.reply(problem, said)
            if not told:
                return task.reward(problem, said)
            low, high = (guess + 1, high) if told == ">" else (low, guess - 1)

    task = tasks.TINY["search"]()
    assert sum(map(search, task.held_out)) == 7


def test_no_held_out_prompt_is_trained() -> None:
    for name in ("count", "mixed"):
        task = tasks.TINY[name]()
        assert not {one.prompt for one in task.trained} & {one.prompt for one in task.held_out}
        assert all(task.reward(one, [one.label]) == 1.0 for one in (*task.trained, *task.held_out))


def row(task: str, rate: float, age: int, held_out: float, *, seed: int = 0, guard: str = "tis") -> dict[str, Any]:
    """A made-up row of sixty steps that has learned half of what it learns after thirty."""
    return {
        **{"task": task, "rate": rate, "staleness": age, "guard": guard, "seed": seed, "steps": 60},
        **{"held_out": held_out, "held_out_error": 0.01, "curve": [[0, 0.0], [30, held_out / 2], [60, held_out]]},
    }


def grid(task: str, *, lost_at: float) -> list[dict[str, Any]]:
    """Made-up runs of three seeds: what is over the product loses a tenth, and opsm wins it back."""
    made = [
        row(task, rate, age, 0.5 + 0.01 * seed - 0.1 * (rate * age > lost_at), seed=seed)
        for seed in range(3)
        for rate in (5e-6, 1e-5, 2e-5)
        for age in (0, 4, 8)
    ]
    opsm = [row(task, 2e-5, 8, 0.52 + 0.01 * seed, seed=seed, guard="opsm") for seed in range(3)]
    topr = [row(task, 2e-5, 8, 0.42 + 0.01 * seed, seed=seed, guard="topr") for seed in range(3)]
    return [*made, *opsm, *topr]


def test_the_page_takes_new_rows_between_its_marks() -> None:
    fresh, old = row("sums", 1e-5, 0, 0.5), row("sums", 1e-5, 4, 0.4)
    again, rehearsal = row("sums", 1e-5, 0, 0.9), row("sums", 1e-5, 0, 0.5, seed=1) | {"steps": 2}
    rows = page.complete([again, old, fresh, rehearsal])
    made = page.tables(rows)
    assert made.startswith("2 runs of 60 steps (2 of sums).")  # a cell as it came last, and no rehearsal
    assert "| 1e-05 | 0.500 | 0.400 |" in made
    assert "| 4e-05 | **-0.100 [-0.128, -0.072]** |" in made  # one seed: 1.96 sqrt(.01^2 + .01^2), over problems
    text = page.PAGE.read_text()
    assert page.renewed(page.renewed(text, rows), []) == page.renewed(text, [])


def test_the_page_says_what_lost_on_each_task_and_up_to_where_nothing_did() -> None:
    rows = [*grid("guess", lost_at=5e-5), *grid("sums", lost_at=1e-4)]
    assert page.losing(rows).splitlines() == [
        "- *guess*: 3 of 6 cells lost: 1e-05 × 8 **-0.100 [-0.100, -0.100]**, 2e-05 × 4 **-0.100 [-0.100, -0.100]**, "
        "2e-05 × 8 **-0.100 [-0.100, -0.100]**.",
        "- *sums*: 1 of 6 cells lost: 2e-05 × 8 **-0.100 [-0.100, -0.100]**.",
        "- With the guard `opsm`: 0 of 2 cells lost. It ended above TIS with tokens as old in 2 of 2 cells.",
        "- With the guard `topr`: 2 of 2 cells lost: 2e-05 × 8 on *guess* **-0.080 [-0.080, -0.080]**, "
        "2e-05 × 8 on *sums* **-0.080 [-0.080, -0.080]**. It ended above TIS with tokens as old in 2 of 2 cells.",
        "- **Not run**: without a guard 5e-06 × 1, 1e-05 × 1, 2e-05 × 1, 5e-06 × 2, 1e-05 × 2, 2e-05 × 2; "
        "with `opsm` 5e-06 × 4, 1e-05 × 4, 2e-05 × 4, 5e-06 × 8, 1e-05 × 8; "
        "with `topr` 5e-06 × 4, 1e-05 × 4, 2e-05 × 4, 5e-06 × 8, 1e-05 × 8.",
    ]
    fresh = row("sums", 2e-5, 0, 0.5, guard="topr")
    assert "`topr`: 2 of 3 cells (1 with fresh tokens) lost" in page.losing([*rows, fresh])
    assert "with `topr` 5e-06 × 4, 1e-05 × 4, 2e-05 × 4, 5e-06 × 8, 1e-05 × 8, 2e-05 × 8 on sums." in page.losing(
        [one for one in rows if (one["task"], one["guard"]) != ("sums", "topr")]
    )
    assert f"{safe_product(cells(rows)):.0e}" == "4e-05"
    assert "the least product that lost is 8e-05 (1e-05 × 8 on *guess*" in page.follows(rows)
    assert "is not over it" in page.follows(rows)
    assert "by product**: 0 of 2 at 2e-05, 0 of 4 at 4e-05, 2 of 4 at 8e-05, 2 of 2 at 0.00016. Of two" in (
        page.follows(rows)
    )
    assert "is **over it**" in page.follows(grid("guess", lost_at=1e-5))


def test_the_reward_of_training_answers_is_compared_with_that_of_as_many_versions_earlier() -> None:
    """The synchronous runs rise by .015 a step of their last 15, so four versions earlier have .06 less."""

    def trained(age: int, seed: int, *last: float) -> dict[str, Any]:
        return row("sums", 1e-5, age, 0.5, seed=seed) | {"metrics": {"reward/mean": [0.0, 0.1, *last]}}

    rows = [trained(age, seed, *last) for seed in (0, 1) for age, last in ((0, (0.3, 0.525)), (4, (0.3, 0.435)))]
    (cell,) = cells(rows)
    found = in_training(rows, cell)
    assert found is not None and found.lost and found.mean == pytest.approx(-0.03)
    assert in_training(rows[:3], cell) is None  # of one seed
    assert in_training([row("sums", 1e-5, age, 0.5, seed=seed) for seed in (0, 1) for age in (0, 4)], cell) is None


def test_the_page_has_differences_at_equal_samples_and_seconds_and_their_mean_over_tasks() -> None:
    """At equal seconds a synchronous run of .5 has taken 33 of 60 steps: .5 x 33.3 / 60 = .278. Seeds differ by .01."""
    made = page.tables([*grid("guess", lost_at=5e-5), *grid("sums", lost_at=1e-4)[:-6]])
    samples, seconds = (part for part in made.split("\n\n") if part.startswith("| rate | staleness | product |"))
    assert "| 8e-05 | **-0.100 [-0.100, -0.100]** | +0.000 [+0.000, +0.000] | **-0.050 [-0.050, -0.050]** |" in samples
    assert "| 8e-05 | +0.127 [+0.116, +0.138] | +0.227 [+0.216, +0.238] | +0.177 [+0.172, +0.182] |" in seconds


def test_an_interval_is_students_of_the_seeds_and_welchs_of_several_tasks() -> None:
    """Seeds of -.1, -.2, -.3: -.2 +- 4.303 x .1 / sqrt(3). Two such tasks have 4 degrees of freedom, and an error of
    .0577 / sqrt(2); beside one whose seeds agree it is that one task's error, halved, with its 2."""

    def lost(task: str, *of: float) -> list[dict[str, Any]]:
        pairs = [((0, 0.5), (4, 0.5 - its)) for its in of]
        return [row(task, 4e-5, age, reward, seed=seed) for seed, two in enumerate(pairs) for age, reward in two]

    rows = [*lost("a", 0.1, 0.2, 0.3), *lost("b", 0.1, 0.2, 0.3), *lost("c", 0.1, 0.1, 0.1)]
    wide, also, none = (cell.samples for cell in cells(rows))
    assert str(wide) == "-0.200 [-0.448, +0.048]"
    assert str(mean_of([wide, also])) == "-0.200 [-0.313, -0.087]"  # 2.776 x .0408
    assert str(mean_of([wide, none])) == "-0.150 [-0.274, -0.026]"  # 4.303 x .0289


def test_the_page_says_whether_a_guard_wins_back_what_was_lost() -> None:
    rows = [*grid("mixed", lost_at=1e-4), *grid("guess", lost_at=1e-4)[:-3]]  # topr on mixed alone
    tables = page.tables(rows)
    each = [line for line in tables.splitlines() if line.startswith("| 2e-05 × 8 | ") and " ± " in line]
    assert [line.split(" | ")[1] for line in each] == ["topr", "opsm", "opsm"]  # what lost stands first
    assert "| 0.430 ± 0.006 | **-0.080 [-0.080, -0.080]** | +0.020 [+0.020, +0.020] |" in each[0]
    assert "| 2e-05 × 8 | mixed, guess | opsm | +0.020 [+0.020, +0.020] | +0.120 [+0.120, +0.120] |" in tables
    assert "| 2e-05 × 8 | mixed | topr | **-0.080 [-0.080, -0.080]** |" in tables  # of its task alone


def test_the_page_counts_false_alarms_among_runs_with_old_tokens() -> None:
    """A drift of 1 / 1.01 for five steps rings. Seed 0 loses unheard, 1 loses and rings, 2 rings for nothing."""

    def drifting(one: dict[str, Any], k3: float) -> dict[str, Any]:
        quarters = {"mismatch/mean": [0.1] * 4, "offpolicy/sequence_ess": [0.5] * 4}
        return one | {"metrics": {"offpolicy/k3": [k3] * 5, "entropy": [1.0] * 5, **quarters}}

    rows = [drifting(row("guess", 1e-5, 0, 0.5, seed=seed), 0.0) for seed in range(3)]
    for seed, (held_out, k3) in enumerate(((0.4, 0.0), (0.4, 1.0), (0.5, 1.0))):
        rows.append(drifting(row("guess", 1e-5, 4, held_out, seed=seed), k3))
    rows.append(drifting(row("guess", 1e-5, 4, 0.5, guard="topr"), 1.0))
    (said,) = [line for line in page.follows(rows).splitlines() if "The alarm" in line]
    assert "rings in 1 of the 2 runs" in said and "it misses 1 of 1e-05 x 4 on *guess*" in said
    assert "in 1 of the 1 others with old tokens** (1 of 1e-05 x 4), and in 0 of 3 synchronous runs" in said
    assert said.endswith("With `topr` it rings in 0 of 0 runs that lost, and in 1 of the 1 others with old tokens.")

    healthy = page.healthy(rows)
    assert "of 3 runs of" in healthy and "in 1 of those that lost, and in 1 of the others" in healthy
    assert "| metric | 1 runs that ended within 0.03 of synchronous ones, or above | 2 that lost more |" in healthy
    assert "| 0.99 (under 0.99) | 0.5 (over 0.099): lower" in healthy


def test_equal_seconds_are_read_off_the_run_beside_it() -> None:
    """The asynchronous run ends after 10 s with a reward of .7; the synchronous one has then taken 5 of 8 steps, of
    which the last five have a mean of .3. Seed 1 has no synchronous run as long, and seed 2 was cut short."""

    def run(arm: str, seed: int, steps: int, each: float, reward: float, **about: Any) -> tuple[Any, list[Any]]:
        settings = {"learner.learning_rate": "1e-5", "staleness.max_staleness": "4"}
        made = [
            {"seconds": each * (step + 1), "reward": reward * step, "staleness_mean": float(step % 2)}
            for step in range(steps)
        ]
        return {"arm": arm, "seed": seed, "is_complete": True, "settings": settings, **about}, made

    recorded = [
        run("async-4-tis", 0, 10, 1.0, 0.1),
        run("sync", 0, 8, 2.0, 0.15),
        run("sync", 0, 3, 2.0, 0.15, is_complete=False),
        run("async-4-tis", 1, 10, 1.0, 0.1),
        run("sync", 1, 4, 2.0, 0.15),
        run("async-4-tis", 2, 10, 1.0, 0.1, is_complete=False),
        run("sync", 2, 8, 2.0, 0.15),
    ]
    (arm,) = seconds.arms(recorded, task="sums")
    assert (arm.rate, arm.bound, arm.steps, arm.age) == (1e-5, 4, [(10, 5)], 0.5)
    assert arm.rewards[0] == pytest.approx((0.7, 0.3))


def test_seeds_that_all_lose_have_lost_however_much_they_differ() -> None:
    rows = [
        row("sums", 4e-5, age, 0.9 - lost, seed=seed)
        for seed, of in ((0, 0.2), (1, 0.9))
        for age, lost in ((0, 0.0), (4, of))
    ]
    (cell,) = cells(rows)
    assert cell.samples.lost and -2 * cell.samples.error < cell.samples.mean  # -.55 +- .35


def test_check_speaks_of_every_product_at_which_a_real_model_lost() -> None:
    assert safe_product(cells(page.complete(read(page.ROWS)))) >= LARGEST_SHOWN * (1 - 1e-9), (
        "lower LARGEST_SHOWN in asyncrl/config/staleness_bound.py"
    )


def test_no_default_bound_reaches_an_age_at_which_a_tiny_task_lost() -> None:
    rows = table.select(read(Path("docs/results/old_tokens.jsonl")), guard="tis")
    for task, rate, age in {(row["task"], row["rate"], row["staleness"]) for row in rows if row["staleness"]}:
        of_task = table.select(rows, task=task, rate=rate)
        differences = table.paired(table.select(of_task, staleness=age), table.select(of_task, staleness=0))
        mean, error = table.interval(differences)
        if mean < -MATTERS and mean < -2 * error and age > 1:  # of one version `asyncrl check` speaks
            assert bound_for(rate, steps=1, trains_adapters=False) < age, (task, rate, age)


@pytest.mark.parametrize(("said", "guard"), [("tis_token", "tis"), ("topr", "topr")])
def test_check_says_the_most_that_a_real_model_lost_at_each_product(said: str, guard: str) -> None:
    lost: dict[float, float] = {}
    for cell in cells(page.complete(read(page.ROWS))):
        if cell.guard == guard and cell.product > LARGEST_SHOWN * (1 + 1e-9):
            product = float(f"{cell.product:.3g}")
            lost[product] = max(lost.get(product, 0.0), -cell.samples.mean)
    assert {product: round(most, 2) for product, most in lost.items()} == MOST_LOST[said]


def test_the_page_is_made_of_the_rows_that_are_there() -> None:
    text = page.PAGE.read_text()
    rows = page.complete(read(page.ROWS))
    assert page.renewed(text, rows) == text
    healthy = page.HEALTHY.read_text()
    assert page.replaced(healthy, "healthy", page.healthy(rows)) == healthy


def test_the_alarm_names_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        alarm.main([str(tmp_path / "gone.jsonl")])
    assert "gone.jsonl: no such file" in capsys.readouterr().err


def test_of_recorded_runs_most_that_lost_were_reported_and_no_synchronous_one() -> None:
    runs = [run for name in ("learning", "learning_rate") for run in alarm.recorded(RECORDED / f"{name}.jsonl")]
    lost, others = alarm.split(runs)
    threshold = MetricsSection().drift_alarm
    assert sum(run.rang_at(threshold) > 0 for run in lost) >= 0.9 * len(lost)
    assert not any(run.rang_at(threshold) for run in others if run.is_synchronous)
    assert not any(run.rang_at(threshold) for run in runs if run.among == "learning" and run.arm == "async-4-tis")
