"""`asyncrl audit RUN_DIR`: accounts for every prompt group of a run, finished, stopped, killed, or still running.

What is read, and how each number follows from it, is in policies/accounting.py (``Account`` says what each means):

  history.jsonl   a line for each group that was trained, dropped, buried or filtered, and for each life of the learner
  checkpoints/    the newest: the ledgers of groups and log records, the prompt position, what is outstanding
  the bus         prompts not done, and the trajectory log with the versions that sampled each token: of the run that
                  is up, else of its own store (a nats-server is started on it and stopped again), else of bus.url
  metrics.jsonl   staleness/max of each step

A run may go on while it is looked at: the witnesses are read in the order in which a group passes them (prompts, log,
checkpoint, history), so that a group on its way is seen at least once.

Exit code 0 when lost = duplicated = staleness_violations = 0, else 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path

from asyncrl.policies.accounting import Account, BusFacts, Logged, SavedFacts, account, sampled_spans
from asyncrl.policies.ledger import Ledger
from asyncrl.protocols import Bus
from asyncrl.recorded import RecordedRun, connected, log_records
from asyncrl.topics import PROMPTS, TRAJECTORIES

SHOWN_PROBLEMS = 20


def audit(directory: Path, *, token: str = "", as_json: bool = False) -> int:
    """Print the account of the run in ``directory``; the exit code says whether it is clean.

    ``token``: of a server that the run file names (bus.url). Raises ConfigError for a folder that holds no run.
    """
    made = account_of(directory, token=token)
    print(json.dumps(made.as_json()) if as_json else table(made, directory))
    return 0 if made.is_clean else 1


def account_of(directory: Path, *, token: str = "") -> Account:
    recorded = RecordedRun(directory)
    run = recorded.newest_settings()
    with recorded.server(run, token=token) as address:
        if address is None:
            return _account(recorded, saved=_saved(recorded), bus=None)

        async def look() -> Account:
            async with connected(run, address) as bus:
                return await account_with(recorded, bus)

        return asyncio.run(look())


async def account_with(recorded: RecordedRun, bus: Bus) -> Account:
    """The account of a run whose bus is here."""
    queued = {int(key) for key in await bus.keys(PROMPTS)}
    log, first = [], 0
    async with contextlib.aclosing(log_records(bus)) as records:
        async for record in records:
            first = first or record.sequence
            if record.key.isdecimal():
                trajectories = () if record.message is None else record.message.trajectories
                spans = tuple(spans for trajectory in trajectories if (spans := sampled_spans(trajectory)))
                log.append(Logged(sequence=record.sequence, group_id=int(record.key), spans=spans))
    saved = _saved(recorded)
    last = await bus.last_sequence(TRAJECTORIES)
    facts = BusFacts(
        prompts=await bus.last_sequence(PROMPTS), queued=queued, log=log, first=first or last + 1, last=last
    )
    return _account(recorded, saved=saved, bus=facts)


def _account(recorded: RecordedRun, *, saved: SavedFacts | None, bus: BusFacts | None) -> Account:
    entries = recorded.history()
    return account(entries, saved=saved, bus=bus, recorded_staleness=_staleness_by_metrics(recorded))


def _saved(recorded: RecordedRun) -> SavedFacts | None:
    found = recorded.checkpoint()
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


def _staleness_by_metrics(recorded: RecordedRun) -> dict[tuple[int, int], int]:
    values = {key: row.get("staleness/max") for key, row in recorded.metrics().items()}
    return {key: int(value) for key, value in values.items() if value is not None}


def table(made: Account, directory: Path) -> str:
    """For a person."""
    rows = [
        ("prompts", made.prompts, "prompt groups published"),
        ("published", made.published, "of these came back from a worker"),
        ("trained", made.trained, f"by {made.steps:,} steps"),
        ("dropped", made.dropped, "too old to train"),
        ("buried", made.buried, "could not be made"),
        ("filtered", made.filtered, "nothing to learn from"),
        ("pending", made.pending, "not done yet"),
        ("retrained", made.retrained, "trained once more, behind a checkpoint that a learner fell back to"),
        ("foreign", made.foreign, "records on the log of groups that this run never published"),
        ("lost", made.lost, ""),
        ("duplicated", made.duplicated, ""),
        ("max_staleness", made.max_staleness, f"versions, of {made.bound} allowed"),
        ("staleness_violations", made.staleness_violations, ""),
        ("epochs", made.epochs, "lives of the learner"),
    ]
    lines = [f"{directory}: every prompt group and what became of it"]
    lines += [f"  {name:22s}{count:>9,}  {meaning}".rstrip() for name, count, meaning in rows]
    lines.append(f"staleness worked out anew from the log for {made.on_log:,} groups, as recorded for the others")
    lines.append(f"compared with metrics.jsonl for {made.with_metrics:,} of {made.steps:,} steps")
    shown = made.problems[:SHOWN_PROBLEMS]
    lines += [f"  {problem}" for problem in shown]
    if len(made.problems) > len(shown):
        lines.append(f"  and {len(made.problems) - len(shown)} more")
    lines.append("clean" if made.is_clean else "NOT CLEAN")
    return "\n".join(lines)
