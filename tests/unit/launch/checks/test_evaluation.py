"""`asyncrl check` on [evaluation]: a share that cannot be kept, and a best model that can never exist."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl import config
from asyncrl.errors import ConfigError
from asyncrl.launch.assembly.data import open_evaluation_sets
from asyncrl.launch.checks.run_file import check
from asyncrl.launch.summary import summarize

BEST = 'checkpoint.best="held_out/majority@4"'


def evaluated(rows: Path) -> str:
    return f'evaluation.datasets=[{{name = "held_out", path = "{rows}", samples = 4}}]'


def warnings(run_file: Path, *overrides: str, caplog: pytest.LogCaptureFixture) -> list[str]:
    rows = run_file.parent / "prompts.jsonl"
    check(config.load(run_file, [evaluated(rows), *overrides]))
    return [one.getMessage() for one in caplog.records if one.getMessage().startswith("evaluation.")]


@pytest.mark.parametrize(
    ("workers", "share", "said"),
    [
        (2, 0.25, "0.25 of 2 rollout workers is less than one, and an evaluation holds back one, 50 % of them; use "
         'rollout.workers = 4 or more, share = 0.5, or place = "dedicated"'),
        (1, 0.25, "0.25 of 1 rollout worker is less than one, and an evaluation holds back one, 100 % of them; use "
         'rollout.workers = 4 or more, share = 1.0, or place = "dedicated"'),
        (3, 0.3, "0.3 of 3 rollout workers is less than one, and an evaluation holds back one, 33 % of them; use "
         'rollout.workers = 4 or more, share = 0.3334, or place = "dedicated"'),
    ],
)  # fmt: skip
def test_warns_of_a_share_of_less_than_one_worker(
    run_file: Path, caplog: pytest.LogCaptureFixture, workers: int, share: float, said: str
) -> None:
    keys = (f"rollout.workers={workers}", f"evaluation.share={share}")
    assert warnings(run_file, *keys, caplog=caplog) == [f"evaluation.share: {said}"]
    mended = said.partition("share = ")[2].partition(",")[0]
    caplog.clear()
    assert warnings(run_file, keys[0], f"evaluation.share={mended}", caplog=caplog) == []
    assert warnings(run_file, "rollout.workers=4", keys[1], caplog=caplog) == []


@pytest.mark.parametrize("place", ["dedicated", "folder"])
def test_dedicated_engines_have_no_share(run_file: Path, caplog: pytest.LogCaptureFixture, place: str) -> None:
    keys = ("rollout.workers=1", f'evaluation.place="{place}"')
    assert warnings(run_file, *keys, caplog=caplog) == []


def test_refuses_a_best_model_by_majority_without_labels(run_file: Path, tmp_path: Path) -> None:
    """`asyncrl check` and the learner refuse it with the same function, which opens the data sets."""
    rows = tmp_path / "rows.jsonl"
    lines = [{"prompt": "1", "label": "2"}, {"prompt": "12"}, {"prompt": "123", "label": "4"}]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = config.load(run_file, [evaluated(rows), BEST])
    for reads in (summarize, open_evaluation_sets):
        with pytest.raises(ConfigError) as refused:
            reads(run)  # type: ignore[operator]
        assert str(refused.value) == (
            "checkpoint.best: held_out/majority@4 needs a label in every row of evaluation.datasets held_out, and "
            "prompt 2 has none (label_key); label it, or name one of mean@4, pass@1, pass@2, pass@4, pass^1, pass^2, "
            "pass^4"
        )
    first_only = evaluated(rows).replace("samples = 4", "samples = 4, limit = 1")
    open_evaluation_sets(config.load(run_file, [first_only, BEST]))
    open_evaluation_sets(config.load(run_file, [evaluated(rows), 'checkpoint.best="held_out/mean@4"']))
