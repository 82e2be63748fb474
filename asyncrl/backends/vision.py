"""The vision tower of a model: transformers' own module, run on the images of a packed row.

A row shows some images at some places. The tower makes features of each image once; they replace the embeddings of
the placeholder tokens of all places that show it, so nothing is padded and no text is computed for an image.
Tests: tests/unit/backends/test_vision.py, tests/contracts/test_backend_images.py (equal to transformers).
"""

from __future__ import annotations

import importlib
import math
from typing import Any, Final

import torch
import torch.nn.functional as F

from asyncrl.backends.families.shape import VisionTower
from asyncrl.backends.kernels import flash
from asyncrl.backends.micro_batches import to_device
from asyncrl.policies.batching.images import PackedImages

_IN_RUNS: Final = "asyncrl_flash_runs"
"""transformers gives runs of tokens, not a mask, to an attention with "flash" in its name."""


def build_tower(vision: VisionTower, *, device: torch.device, dtype: torch.dtype) -> Any:
    """Return transformers' module with weights of no meaning. Angles stay in float32, as transformers has them."""
    module, name = vision.module.split(":")
    with torch.device(device):
        made: Any = getattr(importlib.import_module(module), name)._from_config(
            vision.config, dtype=dtype, attn_implementation="sdpa"
        )
    if device.type == "cuda" and dtype.itemsize == 2:
        attend_in_runs(made)
    made.patch_embed = _PatchProduct(made.patch_embed.proj)
    return made.eval()


def attend_in_runs(tower: Any) -> None:
    """Let the tower attend with FlashAttention. Otherwise it attends image by image, and window by window."""
    import transformers  # takes seconds

    transformers.AttentionInterface.register(_IN_RUNS, _attend_in_runs)
    tower.config._attn_implementation = _IN_RUNS  # set_attn_implementation would look for a package of that name


class _PatchProduct(torch.nn.Module):
    """The tower's first convolution, whose patches do not overlap, as a product: its kernels in 16 bits are slow."""

    def __init__(self, proj: torch.nn.Conv3d) -> None:
        super().__init__()
        self.proj = proj

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        return F.linear(patches.to(self.proj.weight.dtype), self.proj.weight.flatten(1), self.proj.bias)


def features(tower: Any, images: PackedImages) -> tuple[torch.Tensor, ...]:
    """Return the features of the row's images, f[F, H]: those of the embedding, then those of the first layers.

    Row f of all of them is for the tokens with ``images.feature_rows`` f. A frozen tower keeps no activations.
    """
    patches = to_device({"patches": images.patches}, tower.device)["patches"].to(tower.dtype)
    with torch.set_grad_enabled(is_trained(tower)):
        return _outputs(tower, patches, torch.from_numpy(images.grids).long())


def is_trained(tower: Any) -> bool:
    """Return whether a pass is to give gradients of the tower's weights."""
    return torch.is_grad_enabled() and any(weight.requires_grad for weight in tower.parameters())


def zero_of_weights(tower: Any, vision: VisionTower) -> torch.Tensor:
    """Return 0, computed with all of the tower's weights, so that their gradients are zeros."""
    side = math.isqrt(vision.merged)
    patches = torch.zeros(vision.merged, vision.patch_size, device=tower.device, dtype=tower.dtype)
    return sum(0.0 * one.sum() for one in _outputs(tower, patches, torch.tensor([[1, side, side]])))  # type: ignore[return-value]


def _outputs(tower: Any, patches: torch.Tensor, grids: torch.Tensor) -> tuple[torch.Tensor, ...]:
    made = tower(patches, grid_thw=grids.to(tower.device))
    return (made.pooler_output, *(getattr(made, "deepstack_features", None) or ()))


def _attend_in_runs(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of [1, heads, n, d] in which the tokens of a run see each other, in transformers' form."""
    runs: Any = cu_seq_lens_q
    if not hasattr(runs, "longest"):
        runs.longest = int(max_length_q)  # waits for the device; the layers share the runs
    own = (x[0].transpose(0, 1) for x in (query, key, value))
    return flash.both_ways(*own, boundaries=runs.int(), longest=runs.longest)[None], None
