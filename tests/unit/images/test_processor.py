"""The model's own processor: patches, grids and placeholders, equal to what transformers computes from them."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from asyncrl.data.tiny_vision_model import make_tiny_vision_model
from asyncrl.errors import ConfigError, ImageError
from asyncrl.images.processor import FILE, ImageProcessor
from asyncrl.images.reading import read_info
from asyncrl.messages.images import positions


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_vision_model(tmp_path_factory.mktemp("model"), num_layers=1, vision_layers=1)


def picture(width: int, height: int) -> bytes:
    made = io.BytesIO()
    Image.new("RGB", (width, height), "red").save(made, "PNG")
    return made.getvalue()


@pytest.mark.parametrize(("width", "height"), [(24, 40), (8, 8), (61, 13), (100, 3)])
def test_the_grid_is_known_before_the_patches_are_made(folder: Path, width: int, height: int) -> None:
    processor, data = ImageProcessor(folder), picture(width, height)
    patches, grid = processor.patches(data)
    assert processor.grid(read_info(data)) == grid
    assert patches.shape == (np.prod(grid), 3 * 2 * 4 * 4)
    assert patches.dtype == np.float32


@pytest.mark.parametrize(("ours", "name"), [("patch_size", "patch_size"), ("merge_size", "spatial_merge_size")])
def test_a_processor_of_another_model_is_refused(folder: Path, tmp_path: Path, ours: str, name: str) -> None:
    settings = json.loads((folder / FILE).read_text())
    (tmp_path / FILE).write_text(json.dumps(settings | {ours: 16}))
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ConfigError, match=f"{ours} is 16, and vision_config.{name} of config.json {settings[ours]}; "):
        ImageProcessor(tmp_path)


def test_a_placeholder_becomes_as_many_tokens_as_its_image_has(folder: Path) -> None:
    processor = ImageProcessor(folder)
    image = processor.token
    tokens, refs = processor.expand([7, image, 8, image], [("ab" * 32, (1, 2, 4)), ("cd" * 32, (1, 2, 2))])
    assert tokens == [7, image, image, 8, image]
    assert [(one.start, one.num_tokens) for one in refs] == [(1, 2), (4, 1)]
    with pytest.raises(ImageError, match="places for 1 images, and there are 0"):
        processor.expand([image], [])


@pytest.mark.parametrize("architecture", ["qwen2_5_vl", "qwen3_vl"])
def test_positions_are_those_of_transformers(tmp_path: Path, architecture: str) -> None:
    import torch
    from transformers import AutoModelForImageTextToText

    folder = make_tiny_vision_model(tmp_path, architecture=architecture)  # type: ignore[arg-type]
    processor = ImageProcessor(folder)
    grids = [(1, 4, 6), (1, 8, 2)]
    tokens, refs = processor.expand(
        [5, processor.token, 6, 7, processor.token, 8], [("ab" * 32, grid) for grid in grids]
    )
    model = AutoModelForImageTextToText.from_pretrained(folder).model
    ids = torch.tensor([tokens])
    expected, _ = model.get_rope_index(ids, (ids == processor.token).int(), torch.tensor(grids))
    assert np.array_equal(expected[:, 0].numpy(), positions(len(tokens), refs))


def test_a_model_without_eyes_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(ConfigError, match="this model reads none"):
        ImageProcessor(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_vl", "image_token_id": 5}')
    with pytest.raises(ConfigError, match=r"preprocessor_config\.json is missing"):
        ImageProcessor(tmp_path)
