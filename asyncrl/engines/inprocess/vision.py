"""What a vision-language model of transformers gets instead of tokens: embeddings, with features in place of images.

The features of an image replace the embeddings of its placeholders, and its tokens have positions in time, height and
width (messages/images.py). A placeholder that the policy sampled itself stays the token that it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from asyncrl.messages.images import positions
from asyncrl.policies.batching.images import ImagePatches


class VisionLanguageModel:
    """The vision tower and the decoder of a transformers model."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def prefill(self, ids: torch.Tensor, images: Sequence[Sequence[ImagePatches]]) -> dict[str, Any]:
        """Return the arguments of ``hidden`` for prompts.

        ids     i64[prompts, longest]
        images  of each prompt, in order
        """
        device = ids.device
        embeddings = self._model.get_input_embeddings()(ids)
        mask = torch.zeros(ids.shape, dtype=torch.bool, device=device)
        made: dict[str, Any] = {
            "inputs_embeds": embeddings,
            "position_ids": torch.from_numpy(
                np.stack([positions(ids.shape[1], [one.ref for one in its]) for its in images], axis=1).astype(np.int64)
            ).to(device),
        }
        shown = [(row, one) for row, its in enumerate(images) for one in its]
        if not shown:
            return made
        features = self._features([one for _, one in shown])
        begin = 0
        for row, one in shown:
            end = begin + one.ref.num_tokens
            embeddings[row, one.ref.start : one.ref.end] = features[0][begin:end].to(embeddings.dtype)
            mask[row, one.ref.start : one.ref.end] = True
            begin = end
        if features[1:]:  # DeepStack: the first layers add features of their own (Qwen3-VL)
            made |= {"visual_pos_masks": mask, "deepstack_visual_embeds": list(features[1:])}
        return made

    def hidden(self, **arguments: Any) -> torch.Tensor:
        """Return the last hidden states [n, tokens, H]."""
        made: torch.Tensor = self._model.model.language_model(**arguments).last_hidden_state
        return made

    def _features(self, images: Sequence[ImagePatches]) -> list[torch.Tensor]:
        """Return the features of all placeholders f[tokens, H], those of the embedding first. Equal images are
        computed once: all answers of a group show the same."""
        numbers: dict[str, int] = {}
        chosen = [numbers.setdefault(one.ref.digest, len(numbers)) for one in images]
        different = [images[chosen.index(number)] for number in range(len(numbers))]
        tower = self._model.model.visual
        patches = torch.from_numpy(np.concatenate([one.patches for one in different])).to(tower.device, tower.dtype)
        grids = torch.tensor([one.ref.grid for one in different], device=patches.device)
        made = tower(patches, grid_thw=grids)
        sizes = [one.ref.num_tokens for one in different]
        of_each = [one.split(sizes) for one in (made.pooler_output, *(getattr(made, "deepstack_features", None) or ()))]
        return [torch.cat([parts[number] for number in chosen]) for parts in of_each]


def delta(num_tokens: int, images: Sequence[ImagePatches]) -> int:
    """Return the position of the token behind a prompt, less its index: an image takes fewer positions than tokens."""
    if not images:
        return 0
    return int(positions(num_tokens + 1, [one.ref for one in images])[0, -1]) - num_tokens
