"""samples.jsonl: bounded, and readable after a kill in the middle of a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl.actors.learner.sample_files import OLDER_FILE, SAMPLES_FILE, SampleFile, read
from asyncrl.policies.groups.sample import GroupSample


def written(directory: Path, *group_ids: int, most_bytes: int = 2**20, prompt: str = "p") -> None:
    file = SampleFile(directory, most_bytes=most_bytes)
    for group_id in group_ids:
        file.write(GroupSample(group_id=group_id, prompt=prompt))


def ids(directory: Path) -> list[int]:
    return [sample.group_id for sample in read(directory)]


def test_what_was_written_is_read_in_order(tmp_path: Path) -> None:
    written(tmp_path, 3, 1, 2)
    written(tmp_path, 4)
    assert ids(tmp_path) == [3, 1, 2, 4]
    assert ids(tmp_path / "nowhere") == []


def test_it_never_grows_over_its_bound_and_keeps_the_newest(tmp_path: Path) -> None:
    written(tmp_path, *range(200), most_bytes=10_000, prompt="x" * 100)
    sizes = [(tmp_path / name).stat().st_size for name in (SAMPLES_FILE, OLDER_FILE)]
    assert sum(sizes) <= 10_000
    kept = ids(tmp_path)
    assert kept == list(range(kept[0], 200))
    assert len(kept) > 10


def test_a_line_that_a_kill_cut_short_costs_itself_alone(tmp_path: Path) -> None:
    written(tmp_path, 1)
    with (tmp_path / SAMPLES_FILE).open("a") as file:
        file.write('{"group_id": 2, "pro')
    written(tmp_path, 3)
    with (tmp_path / SAMPLES_FILE).open("a") as file:
        file.write('"a string"\n{"group_id": "x"}\n[1]\n\n')
    assert ids(tmp_path) == [1, 3]


def test_a_file_that_somebody_removes_is_begun_anew(tmp_path: Path) -> None:
    file = SampleFile(tmp_path, most_bytes=2**20)
    for group_id in (1, 2, 3):
        file.write(GroupSample(group_id=group_id))
        if group_id == 1:
            (tmp_path / SAMPLES_FILE).unlink()
    assert ids(tmp_path) == [2, 3]


@pytest.mark.parametrize(
    "change",
    [
        *(
            {"step": "7"},
            {"reason": 3},
            {"prompt": 3},
            {"time": "now"},
            {"prompt_tokens": [1, "2"]},
            {"group_id": None},
        ),
        *({"answers": [{"reward": "high"}]}, {"answers": [{"reward": float("nan")}]}, {"answers": [{"turns": ["hi"]}]}),
        *(
            {"answers": [{"turns": [["policy", 3]]}]},
            {"answers": [{"versions": [[0, 0]]}]},
            {"answers": [{"parts": []}]},
        ),
        *(
            {"answers": [{"parts": {"a": "b"}}]},
            {"answers": [{"logprobs": [None]}]},
            {"answers": 3},
            {"answers": ["x"]},
        ),
    ],
)
def test_a_line_of_another_shape_is_left_out(change: dict[str, Any], tmp_path: Path) -> None:
    whole = GroupSample(group_id=1).as_json()
    (tmp_path / SAMPLES_FILE).write_text(f"{json.dumps(whole | change)}\n{json.dumps(whole | {'group_id': 2})}\n")
    assert ids(tmp_path) == [2]
