"""The vision tower that backends run, and what a rank needs of a row's pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from asyncrl.backends import flops, huggingface, vision
from asyncrl.backends.families.vision import interleaved, sections
from asyncrl.backends.kernels import flash
from asyncrl.backends.megatron import refusals
from asyncrl.backends.megatron.row_images import RowImages
from asyncrl.backends.weight_map import Part, weight_map
from asyncrl.config.layout import Layout
from asyncrl.errors import ConfigError
from asyncrl.policies.batching.images import NO_IMAGES, PackedImages, pack_images
from tests.harness.images import picture, tiny_vision_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision_model(tmp_path_factory.mktemp(request.param), architecture=request.param)


def row() -> PackedImages:
    """A sequence of 8 tokens that shows a picture of 4 tokens at 2, and one of 7 tokens that shows it at 1, then a
    picture of 2 tokens."""
    square, wide = picture((1, 4, 4), start=2, seed=1), picture((1, 2, 4), start=5, seed=2)
    again = picture((1, 4, 4), start=1, seed=1)
    return pack_images([(8, [square]), (7, [again, wide])])


def tower_of(folder: Path) -> tuple[Any, Any]:
    shape = huggingface.read_shape(folder)
    assert shape.vision is not None
    tower = vision.build_tower(shape.vision, device=CPU, dtype=torch.float32)
    with huggingface.open_weights(folder) as read, torch.no_grad():
        for name, weight in tower.named_parameters():
            weight.copy_(read(shape.vision.prefix + name))
    return tower, shape.vision


def test_a_tower_that_attends_in_runs_makes_the_same_features(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the runs are FlashAttention's; here they are attended one by one."""

    def both_ways(*inputs: torch.Tensor, boundaries: torch.Tensor, longest: int) -> torch.Tensor:
        sizes = boundaries.diff().tolist()
        assert max(sizes) == longest
        runs = zip(*(torch.split(x.transpose(0, 1)[None], sizes, dim=2) for x in inputs), strict=True)
        return torch.cat([F.scaled_dot_product_attention(*run)[0].transpose(0, 1) for run in runs])

    monkeypatch.setattr(flash, "both_ways", both_ways)
    tower, _ = tower_of(folder)
    plain = vision.features(tower, row())
    vision.attend_in_runs(tower)
    for one, other in zip(vision.features(tower, row()), plain, strict=True):
        torch.testing.assert_close(one, other)


def test_a_row_without_pictures_gives_every_weight_of_a_tower_a_gradient_of_zero(folder: Path) -> None:
    tower, shape = tower_of(folder)
    torch.autograd.backward(vision.zero_of_weights(tower, shape))
    for name, weight in tower.named_parameters():
        assert weight.grad is not None and not weight.grad.any(), name


def test_a_part_knows_which_of_its_tokens_show_which_features() -> None:
    """15 tokens in 16, of which a context-parallel rank holds the last 8. The second picture's features are 4 and 5.

    tokens    8  9 10 11 12 13 14 15 (padding)
    features  -  0  1  2  3  4  5  -
    """
    images = row()
    assert images.token_rows.tolist() == [2, 3, 4, 5, 9, 10, 11, 12, 13, 14]
    kept = np.arange(8, 16)
    found = [
        RowImages.of_part(images, first=np.arange(15), length=16, kept=kept, piece=(rank, 2), device=CPU)
        for rank in (0, 1)
    ]
    assert [one.places.tolist() for one in found] == [[1, 2, 3], [0, 1, 2]]
    assert [one.features.tolist() for one in found] == [[0, 1, 2], [3, 4, 5]]
    # the second sequence begins at 0 again; its square has 2 x 2 tokens from 1 on, and the wide picture begins at 3
    assert found[0].positions.tolist() == [
        [0, 1, 1, 1, 1, 3, 3, 0],
        [0, 1, 1, 2, 2, 3, 3, 0],
        [0, 1, 2, 1, 2, 3, 4, 0],
    ]


def test_axes_have_sections_or_take_turns() -> None:
    assert sections([2, 1, 1], 4).tolist() == [0, 0, 1, 2]
    assert interleaved([4, 2, 2], 8).tolist() == [0, 1, 2, 0, 1, 2, 0, 0]


def test_flops_of_a_tower_are_counted_by_hand(tmp_path: Path) -> None:
    """Two layers of 32 with three matrices of 32 x 64, patches of 96 numbers, a merger of 128 x 128 and 128 x 64.

    In the first layer a patch sees 16 patches, in the second all 24 of its picture.
    """
    shape = huggingface.read_shape(tiny_vision_model(tmp_path, architecture="qwen2_5_vl"))
    assert shape.vision is not None
    products = 24 * (96 * 32 + 2 * (4 * 32 * 32 + 3 * 32 * 64)) + 6 * (128 * 128 + 128 * 64)
    frozen = 2 * products + 4 * 32 * 24 * (16 + 24)
    assert flops.vision_flops(shape.vision, [(1, 4, 6)], is_trained=False) == frozen
    assert flops.vision_flops(shape.vision, [(1, 4, 6)] * 2, is_trained=True) == 2 * 3 * frozen
    assert flops.vision_flops(shape.vision, NO_IMAGES.grids.tolist(), is_trained=True) == 0


def test_a_stage_that_would_lack_layers_with_features_of_the_tower_is_refused(tmp_path: Path) -> None:
    folder = tiny_vision_model(tmp_path, architecture="qwen3_vl", num_layers=4)
    config = folder / "config.json"
    config.write_text(
        config.read_text().replace(
            '"deepstack_visual_indexes": [\n      0\n    ]', '"deepstack_visual_indexes": [0, 1, 2]'
        )
    )
    layout = Layout(ranks=2, pipeline=2)
    with pytest.raises(
        ConfigError, match=r"learner.pipeline_parallel: the model's first 3 layers .* would hold 2; use"
    ):
        refusals.require_trainable(folder, where="model.path", layout=layout, transformer={})
    uneven = {"num_layers_in_first_pipeline_stage": 3}
    refusals.require_trainable(folder, where="model.path", layout=layout, transformer=uneven)


def test_only_the_first_part_of_a_model_has_its_tower(folder: Path) -> None:
    shape = huggingface.read_shape(folder)
    assert shape.vision is not None
    parts = [
        Part(layers=range(at, at + 1), experts=range(0), has_embedding=not at, has_output=bool(at)) for at in (0, 1)
    ]
    held = [sum(entry.is_of_vision for entry in weight_map(shape, part=part)) for part in parts]
    assert held == [len(shape.vision.weights), 0]
