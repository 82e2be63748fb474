"""Save the table of group states to a checkpoint, and restore it (G4 in table.py)."""

from __future__ import annotations

from asyncrl.policies.groups.ledger import Ledger
from asyncrl.policies.groups.saved import LearnerState, PromptState
from asyncrl.policies.groups.states import Fate, PublishedPrompt
from asyncrl.policies.groups.table import GroupTable


def save(table: GroupTable, *, groups_per_batch: int, history: int) -> LearnerState:
    """Return everything that a resumed learner needs.  history: current length of history.jsonl"""
    waiting = {group_id: one.prompt for group_id, one in (table.buffered | table.training).items()}
    prompts = dict(sorted((table.outstanding | waiting).items()))
    return LearnerState(
        incarnation=table.incarnation,
        step=table.step,
        policy_version=table.policy_version,
        groups=table.done.as_json(),
        consumed=table.consumed.as_json(),
        prompts=PromptState(
            next_group_id=table.next_group_id,
            position=table.position,
            overlong=table.overlong,
            outstanding={group_id: prompt.position for group_id, prompt in prompts.items()},
            oldest_start={i: prompt.oldest_start for i, prompt in prompts.items() if prompt.oldest_start is not None},
        ),
        groups_trained=table.counts["trained"],
        groups_dropped=table.counts["dropped"],
        groups_failed=table.counts["failed"],
        groups_filtered=table.counts["filtered"],
        groups_per_batch=groups_per_batch,
        resume_points=dict(table.resume_points),
        history=history,
        log={"identity": table.log, "sequence": table.last_read[0], "stored": table.last_read[1]},
    )


def restore(state: LearnerState) -> GroupTable:
    """Return the table of a checkpoint."""
    starts = state.prompts.oldest_start
    counts: dict[Fate, int] = {
        "trained": state.groups_trained,
        "dropped": state.groups_dropped,
        "failed": state.groups_failed,
        "filtered": state.groups_filtered,
    }
    consumed = Ledger.from_json(state.consumed)
    return GroupTable(
        incarnation=state.incarnation,
        step=state.step,
        batches_taken=state.step,
        resume_points=dict(state.resume_points),
        done=Ledger.from_json(state.groups),
        consumed=consumed,
        cursor=consumed.watermark - 1,
        log=state.log.get("identity", ""),
        last_read=(state.log.get("sequence", consumed.watermark - 1), state.log.get("stored", 0)),
        covered=consumed.watermark,
        next_group_id=state.prompts.next_group_id,
        position=state.prompts.position,
        overlong=state.prompts.overlong,
        outstanding={
            group_id: PublishedPrompt(position=position, oldest_start=starts.get(group_id))
            for group_id, position in state.prompts.outstanding.items()
        },
        counts=counts,
        counts_before_step=dict(counts),
    )
