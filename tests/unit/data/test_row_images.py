"""Rows that show images: expanded placeholders, and a broken image that costs its row alone."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import DataSection
from asyncrl.config.images import ImagesSection
from asyncrl.data.prompts import PromptDataset
from asyncrl.data.row_check import RowLimits
from asyncrl.data.row_images import RowImages
from asyncrl.data.tiny_vision_model import make_tiny_vision_model
from asyncrl.data.tokenizer import load_tokenizer
from asyncrl.errors import ConfigError
from asyncrl.images.processor import ImageProcessor
from asyncrl.images.reading import write_png
from asyncrl.images.store import ImageStore, digest_of

PICTURE = write_png(16, 8, bytes(16 * 8 * 3))  # 2 x 1 tokens


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_vision_model(tmp_path_factory.mktemp("model"), num_layers=1, vision_layers=1)


def opened(folder: Path, model: Path, rows: list[dict[str, Any]], **images: Any) -> PromptDataset:
    (folder / "a.png").write_bytes(PICTURE)
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return over(path, model, **images)


def over(path: Path, model: Path, **images: Any) -> PromptDataset:
    return PromptDataset.open(
        DataSection(path=str(path), image_key="images", chat_template=True, shuffle=False),
        tokenizer=load_tokenizer(model),
        seed=0,
        limits=RowLimits(reads_images=True),
        images=RowImages(
            processor=ImageProcessor(model),
            store=ImageStore(folder=path.parent / "kept"),
            section=ImagesSection(**images),
            key="images",
            folder=path.parent,
        ),
    )


def test_a_row_shows_its_image_by_digest_and_place(tmp_path: Path, model: Path) -> None:
    row = opened(tmp_path, model, [{"prompt": "<image>how many?", "images": ["a.png"]}]).at(0)
    assert row is not None
    (image,) = row.images
    assert (image.digest, image.grid, image.num_tokens) == (digest_of(PICTURE), (1, 2, 4), 2)
    token = ImageProcessor(model).token
    assert [place for place, one in enumerate(row.tokens.tolist()) if one == token] == [image.start, image.start + 1]
    assert (tmp_path / "kept" / image.digest).read_bytes() == PICTURE


def test_a_parquet_file_holds_its_images(tmp_path: Path, model: Path) -> None:
    """As Hugging Face's data sets write them."""
    path, parquet = tmp_path / "rows.parquet", pytest.importorskip("pyarrow.parquet")
    images = [{"bytes": PICTURE, "path": None}, {"bytes": PICTURE, "path": "a.png"}]
    parquet.write_table(
        pytest.importorskip("pyarrow").Table.from_pylist([{"prompt": "is <image> <image>?", "images": images}]), path
    )
    row = over(path, model).at(0)
    assert row is not None
    assert [(image.digest, image.num_tokens) for image in row.images] == [(digest_of(PICTURE), 2)] * 2


def test_a_key_that_is_no_column_is_told_to_name_the_one_with_images(tmp_path: Path, model: Path) -> None:
    with pytest.raises(ConfigError, match=r"'pictures' holds no text.*name the column in data.image_key"):
        opened(tmp_path, model, [{"prompt": "how many?", "pictures": ["a.png"]}]).at(0)


def test_a_broken_image_costs_its_row_and_says_why_once(
    tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    rows = opened(
        tmp_path,
        model,
        [{"prompt": "a", "images": ["none.png"]}, {"prompt": "b"}, {"prompt": "<image><image>", "images": ["a.png"]}],
    )
    first, second, third = (rows.at(position) for position in range(3))
    assert first is not None and second is not None and third is not None
    assert len(first.tokens) == len(third.tokens) == 0 and len(second.tokens) > 0
    assert f"rows.jsonl:1: image 1: {tmp_path}/none.png cannot be read" in first.problem
    assert "places for 2 images, and the row has 1" in third.problem
    rows.at(3)  # the next epoch
    assert sum("none.png" in record.message for record in caplog.records) == 1


def test_a_missing_folder_is_no_warning_for_each_of_its_rows(
    tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = opened(tmp_path, model, [{"prompt": "b"}, *({"prompt": "a", "images": [f"{n}.png"]} for n in range(40))])
    caplog.set_level(logging.WARNING)
    caplog.clear()
    assert all(rows.at(position) for position in range(41)) and rows.broken == 40
    assert len(caplog.records) == 11 and "further such rows" in caplog.records[-1].message


def test_limits_cost_the_row_too(tmp_path: Path, model: Path) -> None:
    rows = [{"prompt": "a", "images": ["a.png", "a.png"]}, {"prompt": "b"}]
    row = opened(tmp_path, model, rows, max_per_prompt=1).at(0)
    assert row is not None and "images.max_per_prompt = 1" in row.problem
    row = opened(tmp_path, model, rows, max_pixels=100).at(0)
    assert row is not None and "more than images.max_pixels = 100" in row.problem


def test_rows_that_are_all_broken_end_the_run(tmp_path: Path, model: Path) -> None:
    with pytest.raises(ConfigError, match=r"can be shown: .*none\.png"):
        opened(tmp_path, model, [{"prompt": "a", "images": ["none.png"]}]).at(0)
