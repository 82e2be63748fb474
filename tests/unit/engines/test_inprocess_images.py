"""The in-process engine with images: it samples from what transformers' own model computes of them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.data.tiny_vision_model import make_tiny_vision_model
from asyncrl.engines.generation import Generation, PartialGeneration
from asyncrl.engines.inprocess.engine import InProcessEngine, Options
from asyncrl.errors import PromptError
from asyncrl.images.processor import ImageProcessor
from asyncrl.images.reading import read_info, write_png
from asyncrl.images.store import ImageFile, digest_of
from asyncrl.messages import SamplingParams, replace
from tests.harness.images import vision_model

SAMPLING = SamplingParams(max_new_tokens=5, ignore_eos=True)


def noise(seed: int, width: int = 24, height: int = 16) -> bytes:
    return write_png(width, height, np.random.default_rng(seed).bytes(width * height * 3))


class Prompts:
    def __init__(self, folder: Path) -> None:
        self._processor, self._network = ImageProcessor(folder), vision_model(folder)
        self.token = self._processor.token

    def __call__(self, text: list[int], *pictures: bytes) -> tuple[np.ndarray[Any, Any], tuple[ImageFile, ...]]:
        shown = [(digest_of(one), self._processor.grid(read_info(one))) for one in pictures]
        tokens, refs = self._processor.expand(text, shown)
        files = tuple(ImageFile(ref=ref, data=data) for ref, data in zip(refs, pictures, strict=True))
        return np.array(tokens, np.int32), files

    def error(self, prompt: np.ndarray[Any, Any], files: tuple[ImageFile, ...], answer: Generation) -> float:
        """Return the largest difference of the answer's logprobs to transformers' own."""
        ids = torch.from_numpy(np.concatenate([prompt, answer.tokens]).astype(np.int64))[None]
        kinds = torch.zeros(ids.shape, dtype=torch.int32)
        for one in files:
            kinds[0, one.ref.start : one.ref.end] = 1
        patches = np.concatenate([self._processor.patches(one.data)[0] for one in files])
        with torch.no_grad():
            logits = self._network(
                input_ids=ids,
                pixel_values=torch.from_numpy(patches),
                image_grid_thw=torch.tensor([one.ref.grid for one in files]),
                mm_token_type_ids=kinds,
            ).logits[0, len(prompt) - 1 : -1]
        found = torch.log_softmax(logits, -1)[range(len(answer.tokens)), answer.tokens.tolist()]
        return float(np.abs(found.numpy() - answer.logprobs).max())


@pytest.mark.parametrize("architecture", ["qwen2_5_vl", "qwen3_vl"])
async def test_samples_from_what_the_model_sees(tmp_path: Path, architecture: Any) -> None:
    folder = make_tiny_vision_model(tmp_path, architecture=architecture, initializer_range=0.15)
    prompts = Prompts(folder)
    image, a, b = prompts.token, noise(1), noise(2, width=8, height=40)
    shown = [prompts([9, image, 8], a), prompts([9, image, 8], noise(3)), prompts([image, 7, image, 6, 5], b, a)]
    engine = InProcessEngine(folder, device="cpu", dtype="float32", version=(0, 0), options=Options(threads=1))
    await engine.start()
    try:

        async def answer(text: Any, files: tuple[ImageFile, ...], seed: int) -> Generation:
            """Return the first answer that samples no placeholder, which transformers would take for an image."""
            while True:
                made = await engine.generate(text, SAMPLING, seed=seed, images=files)
                if image not in made.tokens:
                    return made
                seed += 100

        *answers, _ = await asyncio.gather(
            *(answer(text, files, n) for n, (text, files) in enumerate(shown)),
            engine.generate(np.array([4, 5], np.int32), SAMPLING, seed=9),  # text in the same batch
        )
        for (text, files), made in zip(shown, answers, strict=True):
            assert prompts.error(text, files, made) < 1e-4
        # Another worker goes on behind two tokens, one of them a placeholder that the policy sampled.
        text, files = shown[0]
        known = replace(answers[0].first(2), tokens=np.array([image, 7], np.int32))
        rest = await engine.generate(text, SAMPLING, seed=3, partial=PartialGeneration(known), images=files)
        assert rest.tokens[:2].tolist() == [image, 7]
        assert len(rest.tokens) == 5
        broken = ImageFile(ref=files[0].ref, data=b"no picture")
        with pytest.raises(PromptError, match="no image"):
            await engine.generate(shown[0][0], SAMPLING, seed=0, images=[replace(broken, ref=ref_of(broken))])
    finally:
        await engine.close()


def ref_of(one: ImageFile) -> Any:
    """Return its reference under a digest that the engine has not seen."""
    return replace(one.ref, digest="0" * 64)
