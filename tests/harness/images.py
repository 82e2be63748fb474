"""Sequences that show pictures, tiny models that see them, and what transformers says of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from asyncrl.data.tiny_model import write_weights
from asyncrl.data.tiny_vision_model import make_tiny_vision_model
from asyncrl.messages.images import ImageRef
from asyncrl.policies.batching.images import ImagePatches
from asyncrl.policies.batching.packing import TrainingSequence
from asyncrl.tensors.transformers_models import load_model
from tests.harness.backends import sequence

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
PATCH_SIZE = 3 * 2 * 4 * 4


def tiny_vision_model(
    folder: Path, *, architecture: str, hidden_size: int = 64, initializer_range: float = 0.15, **options: Any
) -> Path:
    """As ``tiny_model``: logits far from uniform, biases and norms other than 0 and 1, a nonzero pad embedding."""
    make_tiny_vision_model(
        folder,
        architecture=architecture,  # type: ignore[arg-type]
        hidden_size=hidden_size,
        initializer_range=initializer_range,
        **options,
    )
    model, generator = load_model(folder, dtype=torch.float32), torch.Generator().manual_seed(1)
    with torch.no_grad():
        model.get_input_embeddings().weight[0] = initializer_range * torch.randn(hidden_size, generator=generator)
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    write_weights(model, folder)
    return folder


def picture(grid: tuple[int, int, int], *, start: int, seed: int) -> ImagePatches:
    """Return a picture of noise; the same seed makes the same one."""
    pixels = np.random.default_rng(seed).standard_normal((int(np.prod(grid)), PATCH_SIZE)).astype(np.float32)
    reference = ImageRef(digest=f"{seed:064x}", grid=grid, start=start, num_tokens=len(pixels) // 4)
    return ImagePatches(ref=reference, patches=pixels)


def pictured_sequences(folder: Path, *, seed: int = 0) -> list[TrainingSequence]:
    """Return sequences of which some show pictures: one, two, none, the same as another one, one at the beginning.

    The last one has a placeholder's token that the policy has sampled: a token like any other.
    """
    square, wide = (1, 4, 4), (1, 2, 6)
    shown: tuple[tuple[int, list[ImagePatches]], ...] = (
        (20, [picture(square, start=2, seed=1)]),
        (30, [picture(wide, start=1, seed=2), picture(square, start=6, seed=3)]),
        (11, []),
        (16, [picture(square, start=3, seed=1)]),
        (2, []),
        (18, [picture((1, 6, 4), start=0, seed=4)]),
        (9, []),
    )
    image = image_token(folder)
    made = [
        showing(sequence(length, seed=100 * seed + number, num_sequences=len(shown)), pictures, image=image)
        for number, (length, pictures) in enumerate(shown)
    ]
    made[-1].tokens[6] = image
    return made


def image_token(folder: Path) -> int:
    return int(transformers.AutoConfig.from_pretrained(folder).image_token_id)


def showing(plain: TrainingSequence, images: Sequence[ImagePatches], *, image: int) -> TrainingSequence:
    """Return the sequence with pictures in the place of some tokens, which then are not trained."""
    tokens, is_image = plain.tokens.copy(), np.zeros(len(plain), np.bool_)
    for one in images:
        is_image[one.ref.start : one.ref.end] = True
    tokens[is_image] = image
    return dataclasses.replace(
        plain,
        tokens=tokens,
        response_mask=plain.response_mask & ~is_image,
        advantages=np.where(is_image, 0, plain.advantages).astype(np.float32),
        loss_weights=np.where(is_image, 0, plain.loss_weights).astype(np.float32),
        behavior_logprobs=np.where(is_image, 0, plain.behavior_logprobs).astype(np.float32),
        staleness=np.where(is_image, 0, plain.staleness).astype(np.int32),
        images=tuple(images),
    )


def answers_to_pictures(folder: Path) -> list[TrainingSequence]:
    """Return eight answers of 6 tokens to prompts of 10, which differ only in the picture that four of them show."""
    made = []
    for number in range(8):
        one = sequence(16, seed=number)
        one.tokens[:10] = sequence(10, seed=99).tokens
        mask = np.arange(16) >= 10
        alike = dataclasses.replace(one, response_mask=mask, loss_weights=np.where(mask, 1 / 48, 0).astype(np.float32))
        made.append(showing(alike, [picture((1, 4, 4), start=3, seed=number % 2)], image=image_token(folder)))
    return made


def model_logprobs(model: Any, one: TrainingSequence) -> torch.Tensor:
    """Return the logprobs of transformers' own model of all tokens of a sequence but the first, f32[T - 1].

    Its own code finds placeholders, positions and features.
    """
    ids = torch.from_numpy(one.tokens.astype(np.int64))
    shown: dict[str, torch.Tensor] = {}
    if one.images:
        kinds = torch.zeros(len(ids), dtype=torch.int32)
        for each in one.images:
            kinds[each.ref.start : each.ref.end] = 1
        shown = {
            "pixel_values": torch.from_numpy(np.concatenate([each.patches for each in one.images])),
            "image_grid_thw": torch.tensor([each.ref.grid for each in one.images]),
            "mm_token_type_ids": kinds[None],
        }
    logits = model(ids[None], **shown).logits[0, :-1]
    return torch.log_softmax(logits, -1).gather(-1, ids[1:, None])[:, 0]


def expected_of(model: Any, batch: Sequence[TrainingSequence]) -> list[NDArray[np.float32]]:
    """Return the logprobs of every sequence, 0 for its first token."""
    with torch.no_grad():
        return [np.concatenate([[0], model_logprobs(model, one).numpy()]).astype(np.float32) for one in batch]


def vision_model(folder: Path) -> Any:
    """Load transformers' own model, but train the pad token's embedding like any other."""
    model = load_model(folder, dtype=torch.float32).eval()
    model.get_input_embeddings().padding_idx = None
    return model


def with_gradients(model: Any, batch: Sequence[TrainingSequence]) -> Any:
    """Return ``model`` with the gradients of GRPO with TIS at ratio 1, sequence by sequence."""
    for one in batch:
        logprobs = model_logprobs(model, one)
        importance = (logprobs.detach() - torch.tensor(one.behavior_logprobs[1:])).exp().clamp(max=2.0)
        loss = (-logprobs * importance * torch.tensor(one.advantages[1:] * one.loss_weights[1:])).sum()
        torch.autograd.backward(loss)
    return model
