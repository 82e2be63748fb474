"""Builds the account of a recorded run from its history, checkpoint, metrics and bus (policies/audit)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from asyncrl.actors.learner import checkpoint
from asyncrl.audit.run_folder import RecordedRun, connect, log_records
from asyncrl.bus.port import Bus
from asyncrl.errors import NoHistory
from asyncrl.messages.topics import EVALUATION, EVALUATION_ANSWERS, PROMPTS, TRAJECTORIES, group_id_of
from asyncrl.policies.audit.accounting import Account, BusFacts, Logged, SavedFacts, account
from asyncrl.policies.audit.evaluations import EvaluationAccount, account_of_evaluations
from asyncrl.policies.groups.ledger import Ledger
from asyncrl.policies.staleness.staleness import sampled_spans


def account_of(directory: Path, *, token: str = "", overrides: Iterable[str] = ()) -> Account:
    """Account for every prompt group of the run in ``directory``. Raises ConfigError for a folder without a run.

    token  token of the bus at bus.url
    """
    recorded = RecordedRun(directory)
    run = recorded.bus_settings(overrides)
    with recorded.server(run, token=token) as address:
        if address is None:
            problems: list[str] = []
            saved = _read_checkpoint(recorded, say=problems.append)
            made = _account(recorded, saved=saved, bus=None, problems=problems, bus_not_asked=recorded.why_no_log(run))
            return made.with_evaluations(account_of_evaluations(recorded.metrics()))

        async def look() -> Account:
            async with connect(run, address) as bus:
                return await account_with(recorded, bus)

        return asyncio.run(look())


async def account_with(recorded: RecordedRun, bus: Bus) -> Account:
    """Account for a run with a connected bus."""
    queued = {group_id for key in await bus.keys(PROMPTS) if (group_id := group_id_of(key)) is not None}
    log, first = [], 0
    async with contextlib.aclosing(log_records(bus, TRAJECTORIES)) as records:
        async for record in records:
            first = first or record.sequence
            if (group_id := group_id_of(record.key)) is not None:
                trajectories = () if record.message is None else record.message.trajectories
                spans = tuple(spans for trajectory in trajectories if (spans := sampled_spans(trajectory)))
                log.append(Logged(sequence=record.sequence, group_id=group_id, spans=spans))
    problems: list[str] = []
    saved = _read_checkpoint(recorded, say=problems.append)
    last = await bus.last_sequence(TRAJECTORIES)
    facts = BusFacts(
        prompts=await bus.last_sequence(PROMPTS), queued=queued, log=log, first=first or last + 1, last=last
    )
    made = _account(recorded, saved=saved, bus=facts, problems=problems)
    return made.with_evaluations(await _evaluations(recorded, bus, training_groups=[one.group_id for one in log]))


async def _evaluations(recorded: RecordedRun, bus: Bus, *, training_groups: Collection[int]) -> EvaluationAccount:
    async with contextlib.aclosing(log_records(bus, EVALUATION_ANSWERS)) as records:
        answers = [record.message async for record in records if record.message is not None]
    return account_of_evaluations(
        recorded.metrics(),
        newest=(await bus.states(EVALUATION)).get(""),
        answers=answers,
        training_groups=training_groups,
    )


def _account(
    recorded: RecordedRun,
    *,
    saved: SavedFacts | None,
    bus: BusFacts | None,
    problems: list[str],
    bus_not_asked: str = "",
) -> Account:
    try:
        entries, is_there = recorded.history(), True
    except NoHistory:
        if not recorded.is_run:
            raise
        entries, is_there = [], False
    staleness = _staleness_by_metrics(recorded, say=problems.append)
    problems += [
        f"{name} was damaged, and is not used" for name in checkpoint.list_damaged(recorded.directory / "checkpoints")
    ]
    has_worked = bool(saved or staleness) or (recorded.directory / "checkpoints").exists()
    return account(
        entries,
        is_history_gone=has_worked and not entries and not (is_there and saved),
        saved=saved,
        bus=bus,
        recorded_staleness=staleness,
        size=recorded.history_bytes,
        damage_elsewhere=problems,
        bus_not_asked=bus_not_asked,
    )


def _read_checkpoint(recorded: RecordedRun, *, say: Callable[[str], None]) -> SavedFacts | None:
    found = recorded.checkpoint(say=say)
    if found is None:
        return None
    state, _ = found
    return SavedFacts(
        step=state.step,
        position=state.history,
        groups=Ledger.from_json(state.groups),
        consumed=Ledger.from_json(state.consumed),
        next_group_id=state.prompts.next_group_id,
        outstanding=state.prompts.outstanding,
    )


def _staleness_by_metrics(recorded: RecordedRun, *, say: Callable[[str], None]) -> dict[tuple[int, int], int]:
    values = {key: row.get("staleness/max") for key, row in recorded.metrics(say=say).items()}
    return {key: int(value) for key, value in values.items() if isinstance(value, int | float)}
