"""Add the outputs of other models, and the advantages that need them, to the micro-batches. Numpy, on the host.

A batch is packed ahead of its step. Whatever depends on the current weights (a critic's values, the policy's logprobs)
is added here, at the step. They arrive as the backend returns them, f32[N] per micro-batch and share. Advantages are
computed over the whole batch, with its response tokens concatenated in the order of its sequences.
Test: tests/actors/learner/test_training_step.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.policies.algorithms.algorithm import Algorithm
from asyncrl.policies.batching import packing
from asyncrl.policies.batching.batch import Batch, gather, scatter
from asyncrl.policies.batching.packing import MicroBatch
from asyncrl.policies.corrections.diagnostics import effective_samples
from asyncrl.policies.losses.loss import Loss
from asyncrl.policies.losses.ratios import ratio

Shares = Sequence[Sequence[MicroBatch]]
ModelOutputs = Mapping[str, Sequence[Sequence[NDArray[np.float32]]]]
PerSequence = list[NDArray[np.float32]]


def complete(
    shares: Shares, model_outputs: ModelOutputs, *, batch: Batch, algorithm: Algorithm
) -> list[list[MicroBatch]]:
    """Return ``shares`` with the advantages and model_outputs that the algorithm derives from ``model_outputs`` (see
    COMPUTED_BY).

    MicroBatch.model_outputs gets
      "ref_logprobs" and "teacher_logprobs" unchanged
      "old_values" and "returns", with a critic
      "prox_logprobs", if several optimizer steps follow
      "effective_fraction", "keep" or "rewards", if the loss asks for them
    """
    known = {name: _by_sequence(shares, of, count=len(batch.sequences)) for name, of in model_outputs.items()}
    taken = ("ref_logprobs", "teacher_logprobs", *(("prox_logprobs",) if algorithm.keeps_prox else ()))
    added: dict[str, PerSequence] = {name: known[name] for name in taken if name in known}
    advantages: PerSequence | None = None
    if algorithm.outputs_for_advantage:
        of_tokens, returns = _advantages(known, batch, algorithm)
        advantages = _on_tokens(of_tokens, batch)
        if returns is not None:
            added |= {
                "old_values": [_before(values) for values in known["values"]],
                "returns": _on_tokens(returns, batch),
            }
    wanted = algorithm.batch_inputs
    if "effective_fraction" in wanted:
        fraction = np.float32(effective_fraction(known["prox_logprobs"], batch))
        added["effective_fraction"] = [np.full(len(sequence), fraction) for sequence in batch.sequences]
    if "keep" in wanted:
        added["keep"] = kept(known["prox_logprobs"], batch, loss=algorithm.loss)
    if "rewards" in wanted:
        rewards = batch.advantage_inputs.rewards.astype(np.float32)
        added["rewards"] = [
            np.full(len(sequence), reward) for sequence, reward in zip(batch.sequences, rewards, strict=True)
        ]
    return [[_with(micro_batch, added, advantages) for micro_batch in share] for share in shares]


def effective_fraction(prox_logprobs: PerSequence, batch: Batch) -> float:
    """Return the effective sample size of the batch's token ratios divided by its trained tokens, in (0, 1]."""
    ratios = ratio(*(of.astype(np.float64) for of in _trained(prox_logprobs, batch))).numpy()
    return effective_samples(float(ratios.sum()), float(np.square(ratios).sum())) / len(ratios) if len(ratios) else 1.0


def kept(prox_logprobs: PerSequence, batch: Batch, *, loss: Loss) -> PerSequence:
    """Return 1 for each trained token of the batch that ``loss`` keeps, else 0.  f32[T] of each sequence"""
    keep = loss.kept(*_trained(prox_logprobs, batch))
    return scatter(keep.numpy(), [sequence.response_mask for sequence in batch.sequences])


def _trained(prox_logprobs: PerSequence, batch: Batch) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the current and the behavior logprobs of all trained tokens of the batch.  f32[M] each"""
    masks = [sequence.response_mask for sequence in batch.sequences]
    return gather(prox_logprobs, masks), gather([sequence.behavior_logprobs for sequence in batch.sequences], masks)


def _advantages(
    known: Mapping[str, PerSequence], batch: Batch, algorithm: Algorithm
) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
    """Return the advantages of the batch's response tokens, and the returns if there is a critic.  f32[M] each"""
    made = batch.advantage_inputs
    if algorithm.kl is not None and algorithm.kl.place == "reward":
        behavior = [sequence.behavior_logprobs for sequence in batch.sequences]
        three = [_sampled(of, batch) for of in (known["prox_logprobs"], known["ref_logprobs"], behavior)]
        made = replace(made, kl=algorithm.kl(*three).numpy())
    if "values" in known:
        made = replace(
            made,
            values=_sampled([_before(values) for values in known["values"]], batch),
            final_values=np.array([values[-1] for values in known["values"]], np.float64),
        )
    return algorithm.advantages(made)


def _before(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """From values after each token to values of the state in which the token was chosen.  f32[T] -> f32[T]"""
    return np.concatenate([np.zeros(1, np.float32), values[:-1]])


def _sampled(values: Sequence[NDArray[Any]], batch: Batch) -> NDArray[np.float64]:
    """Concatenate the values of all response tokens of the batch.  f32[T] per sequence -> f64[M]"""
    return gather(values, batch.sampled).astype(np.float64)


def _on_tokens(of_sampled: NDArray[np.float32], batch: Batch) -> PerSequence:
    """Split values of the response tokens by sequence; 0 where nothing is trained.  f32[M] -> f32[T] per sequence"""
    return [
        np.where(sequence.response_mask, values, np.float32(0))
        for sequence, values in zip(batch.sequences, scatter(of_sampled, batch.sampled), strict=True)
    ]


def _by_sequence(shares: Shares, arrays: Sequence[Sequence[NDArray[np.float32]]], *, count: int) -> PerSequence:
    """From f32[N] per micro-batch to f32[T] for each of the batch's ``count`` sequences."""
    found = {
        int(index): array[place]
        for share, of_share in zip(shares, arrays, strict=True)
        for micro_batch, array in zip(share, of_share, strict=True)
        for index, place in zip(micro_batch.sequences, packing.sequence_slices(micro_batch), strict=True)
    }
    return [found[index] for index in range(count)]


def _with(micro_batch: MicroBatch, added: Mapping[str, PerSequence], advantages: PerSequence | None) -> MicroBatch:
    def packed(values: PerSequence) -> NDArray[np.float32]:
        lengths = np.diff(micro_batch.boundaries)
        pieces = [
            values[index] if index >= 0 else np.zeros(length, np.float32)
            for index, length in zip(micro_batch.sequences, lengths, strict=True)
        ]
        return np.concatenate(pieces)

    model_outputs = {**micro_batch.model_outputs, **{name: packed(values) for name, values in added.items()}}
    made = micro_batch.advantages if advantages is None else packed(advantages)
    return replace(micro_batch, model_outputs=model_outputs, advantages=made)
