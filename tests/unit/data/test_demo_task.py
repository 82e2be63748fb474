"""The demo's model and prompts."""

from __future__ import annotations

from pathlib import Path

from asyncrl import config
from asyncrl.data import demo_task
from asyncrl.data.model_folder import check_model
from asyncrl.data.prompts import PromptDataset
from asyncrl.data.tokenizer import load_tokenizer
from tests import ROOT


def test_the_demo_makes_what_its_run_file_names(tmp_path: Path) -> None:
    demo_task.write(tmp_path)
    run = config.load(
        ROOT / "examples" / "demo.toml",
        [f"model.path={tmp_path / 'model'}", f"data.path={tmp_path / 'prompts.jsonl'}"],
    )
    check_model(Path(run.model.path))
    dataset = PromptDataset.open(run.data, tokenizer=load_tokenizer(Path(run.model.path)), seed=run.run.seed)
    rows = [row for position in range(dataset.num_rows) if (row := dataset.at(position))]
    assert {(row.prompt, row.label) for row in rows} >= {("7", "0123"), ("67", "0123"), ("4567", "0123")}
    assert all(len(row.tokens) == len(row.prompt) for row in rows)
