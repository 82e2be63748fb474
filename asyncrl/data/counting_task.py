"""A task that needs its images: count the squares. Images, prompts and a tiny model are made here, not downloaded.

An image has 24 x 24 pixels, which the tiny model sees as nine tokens, and one to four squares of any colour in its
nine cells. The answer is one digit. Whoever does not look is right once in four times. The arrangements of the held-out
images are in none of the others. ``python -m asyncrl.data.counting_task FOLDER`` writes everything.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from asyncrl.images.reading import write_png
from asyncrl.rewards.port import Reward, Sample

if TYPE_CHECKING:
    from asyncrl.data.tiny_vision_model import VisionArchitecture

MOST: Final = 4
QUESTION: Final = "<image>how many?"
_SIDE: Final = 24
_CELLS: Final = 3


def reward(sample: Sample) -> Reward:
    """Return 1 for an answer that begins with the number of squares, else 0."""
    return Reward(value=float(sample.completion[:1] == sample.label))


def arrangements(*, are_held_out: bool) -> list[tuple[int, ...]]:
    """Return the cells of the squares of each arrangement of the training or held-out images."""
    found = [cells for count in range(1, MOST + 1) for cells in itertools.combinations(range(_CELLS**2), count)]
    return [cells for number, cells in enumerate(found) if (number % 5 == 4) == are_held_out]


def draw(cells: tuple[int, ...], rng: random.Random) -> bytes:
    """Return the PNG of an image with a square in each of ``cells``, on a dark ground."""
    ground = tuple(rng.randrange(60) for _ in range(3))
    pixels = [[ground] * _SIDE for _ in range(_SIDE)]
    size = _SIDE // _CELLS
    for cell in cells:
        colour = tuple(rng.randrange(150, 256) for _ in range(3))
        top, left = cell // _CELLS * size + rng.randrange(2), cell % _CELLS * size + rng.randrange(2)
        for y, x in itertools.product(range(top, top + 6), range(left, left + 6)):
            pixels[y][x] = colour
    return write_png(_SIDE, _SIDE, bytes(value for row in pixels for pixel in row for value in pixel))


def write(
    folder: Path,
    *,
    seed: int = 0,
    count: int = 400,
    architecture: VisionArchitecture = "qwen2_5_vl",
    sizes: Mapping[str, Any] | None = None,
) -> None:
    """Write prompts.jsonl, held_out.jsonl, their images, blind.jsonl and model, a tiny model, to ``folder``.

    count  number of training images, as many of each answer; a quarter as many are held out
    sizes  of the model, as in make_tiny_vision_model
    blind.jsonl asks the held-out questions without their images
    """
    from asyncrl.data.tiny_vision_model import make_tiny_vision_model  # imports torch

    rng = random.Random(seed)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for name, are_held_out, number in (("prompts", False, count), ("held_out", True, count // 4)):
        by_count = {
            answer: [cells for cells in arrangements(are_held_out=are_held_out) if len(cells) == answer]
            for answer in range(1, MOST + 1)
        }
        rows = []
        for index in range(number):
            answer = index % MOST + 1
            path = f"images/{name}-{index:04d}.png"
            (folder / path).write_bytes(draw(rng.choice(by_count[answer]), rng))
            rows.append({"prompt": QUESTION, "images": [path], "label": str(answer)})
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    blind = [{"prompt": QUESTION.removeprefix("<image>"), "label": row["label"]} for row in rows]
    (folder / "blind.jsonl").write_text("".join(json.dumps(row) + "\n" for row in blind))
    make_tiny_vision_model(
        folder / "model",
        architecture=architecture,
        seed=seed,
        characters="01234567 ?howmany",
        max_positions=64,
        initializer_range=0.05,
        **(sizes or {}),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m asyncrl.data.counting_task", description=__doc__)
    parser.add_argument("folder", type=Path, help="where the model, the prompts and the images are written")
    write(parser.parse_args().folder)
