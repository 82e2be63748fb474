"""From trajectory groups to a packed batch: build it, let the user's hooks change it, pack it.

The learner, a replay and the planner do it alike.
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.actors.learner.image_reader import ImageReader
from asyncrl.config import RunConfig
from asyncrl.messages import TrajectoryGroup
from asyncrl.policies.algorithms.algorithm import Algorithm
from asyncrl.policies.batching import batch as batches
from asyncrl.policies.batching.batch import Batch
from asyncrl.policies.batching.hooks import Hooks
from asyncrl.policies.batching.packing import MiniBatches, pack_mini_batches
from asyncrl.policies.staleness.staleness import ResumePoints, age_weight


def prepare(
    groups: Sequence[TrajectoryGroup],
    *,
    run: RunConfig,
    algorithm: Algorithm,
    hooks: Hooks,
    shares_prefixes: bool,
    policy_version: int,
    max_staleness: int,
    resume_points: ResumePoints,
    image_reader: ImageReader | None,
) -> tuple[Batch, MiniBatches]:
    """Return the batch of ``groups`` for the step from ``policy_version``, and its mini-batches for each rank.

    max_staleness    bound of the incarnation that took the batch
    shares_prefixes  whether the backend computes tokens once that sequences begin with
    image_reader     None: the model reads text alone
    """
    section = run.staleness
    batch = batches.build(
        groups,
        algorithm=algorithm,
        policy_version=policy_version,
        max_staleness=max_staleness,
        resume_points=resume_points,
        age_weight=age_weight(section.weight, rate=section.weight_rate, max_staleness=run.max_staleness),
        discard=section.discard,
        **({} if image_reader is None else {"images": image_reader.of}),
    )
    batch = hooks.batch(batch, groups, has_advantages=not algorithm.outputs_for_advantage)
    mini_batches = pack_mini_batches(
        batch.sequences,
        sizes=batch.mini_batch_sizes,
        ranks=run.learner.data_parallel,
        max_tokens=run.learner.micro_batch_tokens,
        shares_prefixes=shares_prefixes,
    )
    return batch, mini_batches
