"""The records of a run as rows for a program: metrics, prompt groups and trajectories.

A row is a flat dict of numbers, strings and lists, so ``pandas.DataFrame(run.metrics())`` is a table. The run may be
finished, stopped or running; nothing of it is changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from asyncrl.audit import run_folder
from asyncrl.audit.metric_rows import Row, rows_of_newest_history
from asyncrl.audit.run_folder import RecordedRun
from asyncrl.bus.port import Bus, Record
from asyncrl.config import RunConfig
from asyncrl.config.toml_text import toml_text
from asyncrl.data.tokenizer import load_decode
from asyncrl.errors import ConfigError
from asyncrl.messages import Trajectory, TrajectoryGroup
from asyncrl.messages.topics import TRAJECTORIES
from asyncrl.policies.audit.entries import BEGUN, present

READ_AHEAD = 16
"""Maximum number of groups that are read from the log in advance."""


def open_run(folder: str | Path, *, bus_url: str = "", bus_token: str = "") -> OpenedRun:
    """Open the run in ``folder`` (run.directory/run.name). Raises ConfigError if no run was started there.

    Lines of its files that cannot be read are left out; `asyncrl audit` counts them.

    bus_url    address of the run's nats-server, for ``trajectories``; empty: the recorded one, where the run ran
    bus_token  its token
    """
    directory = Path(folder)
    if not directory.is_dir():
        raise ConfigError(f"{directory}: no such run folder")
    return OpenedRun(directory, bus_url=bus_url, bus_token=bus_token)


class OpenedRun:
    """The records of one run; created by ``open_run``.

    folder    run.directory/run.name
    settings  run file of its last start, defaults filled in; run.directory and run.name are those of the present folder
    """

    def __init__(self, folder: Path, *, bus_url: str, bus_token: str) -> None:
        self.folder = folder
        self._token = bus_token
        self._recorded = RecordedRun(folder)
        here = f"run.directory={toml_text(str(folder.absolute().parent))}"
        url = [f"bus.url={toml_text(bus_url)}"] if bus_url else []
        self._begun = self._recorded.newest_settings([here, *url])
        """Settings with the run's name on its bus."""
        name = folder.absolute().name
        self.settings: RunConfig = replace(self._begun, run=replace(self._begun.run, name=name))

    def metrics(self) -> Iterator[Row]:
        """Yield a row per step, as in metrics.jsonl; docs/reference/metrics.md describes the metrics.

        A histogram has two columns, NAME/edges and NAME/counts. For a step that a resumed learner trained again, only
        the last row is included.
        """
        yield from metric_rows(self._recorded)

    def groups(self) -> Iterator[Row]:
        """Yield a row for each finished prompt group, in the order in which they finished.

        group_id     number of the group, from 0
        outcome      "trained", "dropped" (too stale), "failed" (could not be made) or "filtered" (nothing to learn)
        step         step that trained it; for other outcomes, the number of steps done at that time
        incarnation  incarnation of the learner, from 0
        """
        for entry in present(self._recorded.history()):
            if entry.kind == BEGUN:
                continue
            for group_id in entry.groups:
                yield {
                    "group_id": group_id,
                    "outcome": entry.kind,
                    "step": entry.step,
                    "incarnation": entry.incarnation,
                }

    def trajectories(self, *, text: bool = False) -> Iterator[Row]:
        """Yield a row for each trajectory on the run's log: all with checkpoint.keep_log, otherwise the newest.

        group_id, sample    number of the prompt group, and of the rollout in it, from 0
        part                number of the trajectory in its rollout, from 0
        sequence            position of the group on the log
        reward              reward of the rollout; reward/NAME: other values from the reward function
        turn_rewards        list of (start, reward): additional rewards of single turns
        prompt_tokens       list of token ids that precede ``tokens``
        tokens              list of token ids after the prompt
        response_mask       list of bool: whether the policy sampled the token
        behavior_logprobs   list of float, nats; 0 where the mask is False
        sampled_tokens      number of tokens that the policy sampled
        finish_reason       "stop", "length" or "abort"
        oldest_version, newest_version  oldest and newest policy version that sampled it
        incarnation         incarnation of the learner that made the newest version
        worker, seconds     worker that sampled the group, and how long it took
        prompt, response    with ``text``: decoded by the run's tokenizer

        Raises ConfigError if nothing is left of the log, BusError if it cannot be read.
        """
        decode = load_decode(self.settings.model.path) if text else None
        for record in _log(self._recorded, self._begun, token=self._token):
            group = record.message
            numbered = enumerate(group.rollouts if group is not None else ())
            for sample, trajectory in ((place, one) for place, parts in numbered for one in parts):
                assert group is not None
                row = _row(group, trajectory, sample=sample, sequence=record.sequence)
                if decode is not None:
                    row |= {"prompt": decode(row["prompt_tokens"]), "response": decode(row["tokens"])}
                yield row


def metric_rows(recorded: RecordedRun) -> Iterator[Row]:
    """See ``OpenedRun.metrics``; empty for a run whose learner has not begun."""
    yield from map(_flat, rows_of_newest_history(recorded.metrics()))


def _flat(row: Row) -> Row:
    """Flatten tables in a row to columns: {"a": {"b": 1}} becomes {"a/b": 1}."""
    flat: Row = {}
    for name, value in row.items():
        flat |= {f"{name}/{key}": item for key, item in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def _row(group: TrajectoryGroup, trajectory: Trajectory, *, sample: int, sequence: int) -> Row:
    newest = max(trajectory.version_spans, key=lambda span: (span.incarnation, span.policy_version))
    return {
        "group_id": group.group_id,
        "sample": sample if trajectory.rollout < 0 else trajectory.rollout,
        "part": trajectory.part,
        "sequence": sequence,
        "reward": trajectory.reward,
        **{f"reward/{name}": value for name, value in trajectory.reward_parts.items()},
        "turn_rewards": [(turn.start, turn.reward) for turn in trajectory.turn_rewards],
        "prompt_tokens": group.prompt_of(trajectory).tolist(),
        "tokens": trajectory.tokens.tolist(),
        "response_mask": trajectory.response_mask.tolist(),
        "behavior_logprobs": trajectory.behavior_logprobs.tolist(),
        "sampled_tokens": int(trajectory.response_mask.sum()),
        "finish_reason": trajectory.finish_reason,
        "oldest_version": min(span.policy_version for span in trajectory.version_spans),
        "newest_version": newest.policy_version,
        "incarnation": newest.incarnation,
        "worker": group.worker,
        "seconds": group.seconds,
    }


def _log(recorded: RecordedRun, run: RunConfig, *, token: str) -> Iterator[Record[TrajectoryGroup]]:
    """Yield the records that are on the log now. A thread reads them, because the caller may run an event loop.

    waits for: that thread, which waits for the bus
    """
    found: queue.Queue[Record[TrajectoryGroup] | None] = queue.Queue(maxsize=READ_AHEAD)
    is_left = threading.Event()

    async def read(bus: Bus) -> None:
        async with contextlib.aclosing(run_folder.log_records(bus, TRAJECTORIES)) as records:
            is_empty = True
            async for record in records:
                is_empty = False
                await asyncio.to_thread(found.put, record)
                if is_left.is_set():
                    return
            if is_empty and await bus.last_sequence(TRAJECTORIES):
                raise ConfigError(
                    f"{recorded.directory}: nothing is left of its log, which is trimmed behind checkpoints; with "
                    "checkpoint.keep_log = true it is kept"
                )

    def work() -> None:
        try:
            recorded.on_bus(run, read, token=token)
        finally:
            found.put(None)

    with ThreadPoolExecutor(1, thread_name_prefix="log") as thread:
        reading = thread.submit(work)
        try:
            while (record := found.get()) is not None:
                yield record
            reading.result()
        finally:
            is_left.set()
            while not reading.done():  # the thread may be waiting for room in the queue
                with contextlib.suppress(queue.Empty):
                    found.get(timeout=0.05)
