"""FLOPs of a training step and peak FLOP/s of devices, for model FLOP/s utilisation (MFU).

Counted as in arXiv:2204.02311, appendix B: 6 x parameters x tokens for the forward and backward passes of every matrix
product (the output layer counts, the embedding look-up does not), plus attention's two products over the scores that
neither the causal mask, nor a window, nor a choice of keys hides. Recomputed activations do not count.
Test: test_flops_of_a_step_are_counted_by_hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from asyncrl.backends.families.shape import Indexer, LinearAttention, ModelShape, VisionTower

PEAK_BF16: Final = {
    "H200": 989e12,
    "H100": 989e12,
    "H800": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
}
"""Dense bfloat16 FLOP/s from the vendors' data sheets, by a word in the device's name. Clocks drop under load: an H200
reaches 700e12 to 790e12 on large matrices.
"""


def matrix_parameters(shape: ModelShape) -> int:
    """Return the number of parameters in the matrix products of every token."""
    layers = range(shape.num_layers)
    in_layers = sum(_attention(shape, layer) + _feed_forward(shape, layer) for layer in layers)
    return in_layers + shape.hidden_size * shape.vocabulary_size


def _attention(shape: ModelShape, layer: int) -> int:
    """Return the attention parameters of a layer."""
    if shape.linear and shape.has_linear_attention(layer):
        return _linear_attention(shape.linear, shape.hidden_size)
    if shape.latent is None:
        queries, keys = shape.num_heads * shape.head_size, shape.num_key_value_heads * shape.head_size
        return shape.hidden_size * ((3 if shape.has_output_gate else 2) * queries + 2 * keys)
    latent, queries = shape.latent, shape.num_heads * shape.head_size
    of_queries = latent.query_rank * (shape.hidden_size + queries) or shape.hidden_size * queries
    up = latent.key_value_rank * shape.num_heads * (latent.plain_size + latent.value_size)
    down = shape.hidden_size * (latent.key_value_rank + latent.rotary_size)
    return of_queries + down + up + shape.num_heads * latent.value_size * shape.hidden_size


def _linear_attention(linear: LinearAttention, hidden_size: int) -> int:
    """Return the parameters of a gated DeltaNet, with the numbers of its states.

    A token multiplies each number of a state three times: by its key to read, by its key to write, and by its query.
    Chunks of tokens take more, which does not count, like recomputation.
    """
    values, convolved = linear.num_value_heads * linear.value_size, linear.num_key_heads * sum(linear.convolved_sizes)
    projections = hidden_size * (convolved + values + 2 * linear.num_value_heads + values)
    return projections + linear.convolved * convolved + 3 * values * linear.key_size


def _feed_forward(shape: ModelShape, layer: int) -> int:
    """Return the feed-forward parameters of a layer; for a mixture, the router and the experts of one token."""
    experts = shape.experts if shape.has_experts(layer) else None
    if experts is None:
        return 3 * shape.hidden_size * shape.feed_forward_size
    visited = experts.experts_per_token * experts.feed_forward_size + experts.shared_size
    return shape.hidden_size * (experts.num_experts + 3 * visited + int(experts.has_shared_gate))


def training_flops(shape: ModelShape, lengths: Iterable[int], *, has_adapters: bool = False) -> float:
    """Return the FLOPs of one optimizer step on sequences of these ``lengths`` in tokens.

    has_adapters  matrices have no gradients; the products of the adapters are not counted
    """
    num_local = len(shape.local.layers) if shape.local else 0
    num_linear = len(shape.linear.layers) if shape.linear else 0
    indexer = shape.latent.indexer if shape.latent else None
    tokens, scores, of_choice = 0, 0, 0
    for length in lengths:
        tokens += length
        seen = length if indexer is None else min(indexer.chosen, length)
        scores += (shape.num_layers - num_local - num_linear) * seen * (2 * length - seen)
        if indexer and length > indexer.chosen:
            of_choice += _choice(indexer, shape, length)
        if shape.local:
            window = min(shape.local.window, length)
            scores += num_local * window * (2 * length - window)
    of_values = shape.latent.value_size if shape.latent else shape.head_size
    width = shape.num_heads * (shape.head_size + of_values)
    passes = 4.0 if has_adapters else 6.0
    return passes * matrix_parameters(shape) * tokens + 3.0 * width * scores + of_choice


def _choice(indexer: Indexer, shape: ModelShape, length: int) -> int:
    """Return the FLOPs of the forward passes of indexers, which have no others, for a sequence of ``length`` tokens."""
    assert shape.latent is not None
    width = indexer.num_heads * indexer.size
    products = shape.latent.query_rank * width + shape.hidden_size * (indexer.size + indexer.num_heads)
    scores = width * (length * length - indexer.chosen * indexer.chosen)
    return len(indexer.layers) * (2 * products * length + scores)


def vision_flops(vision: VisionTower, grids: Iterable[Sequence[int]], *, is_trained: bool) -> float:
    """Return the FLOPs of a vision tower on images of these ``grids`` (patches in time, height and width), once each.

    A patch sees its own frame. A tower that is not trained has a forward pass only.
    """
    total = 0.0
    for time, height, width in grids:
        frame = height * width
        patches = time * frame
        products = vision.patch_products * patches + vision.token_products * patches / vision.merged
        seen = vision.num_whole * frame + vision.num_windowed * min(vision.window, frame)
        total += 2.0 * products + 4.0 * vision.size * patches * seen
    return (3.0 if is_trained else 1.0) * total


def peak_flops(device_name: str) -> float | None:
    """Return the peak bfloat16 FLOP/s of a device; None if it is not in the table."""
    return next((peak for word, peak in PEAK_BF16.items() if word in device_name), None)
