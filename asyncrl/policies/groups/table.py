"""The state of every prompt group, in one place: events in, effects out, without I/O or a clock.

    published --> buffered --> training --> trained
        |          |    ^         |
        v          v    +---------+  put back: the batch is not trained after all
      failed    dropped, filtered

Each method under "events" records something that happened. It returns what must follow outside: an ``Outcome`` for
groups that left the window, which is written to the history, announced and reported as progress. The window
(admission.py), the choice of batches (selection.py), checkpoints (saved_table.py), audit and metrics read the table.

Invariants (tests/unit/policies/groups/test_table.py, test_table_events.py):
  G1 a group is in one state at a time and leaves the window once, even if the log delivers it twice.
  G2 published = outstanding + buffered + training + trained + dropped + failed + filtered.
  G3 the log records of a group are consumed when the group leaves the window, and not before.
  G4 a table restored from a checkpoint equals the table at that moment, except that groups that were buffered or in
     training are outstanding again: the log from the saved cursor on brings them back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from asyncrl.messages import TrajectoryGroup
from asyncrl.policies.groups.ledger import Ledger
from asyncrl.policies.groups.saved import LearnerState
from asyncrl.policies.groups.states import FATES, Arrival, BufferedGroup, Fate, Outcome, PublishedPrompt
from asyncrl.policies.groups.validation import PromptSpec
from asyncrl.policies.staleness.staleness import newest_version, oldest_version


@dataclass(slots=True, kw_only=True)
class GroupTable:
    """The table of prompt groups. Read any field; only the event methods change fields.

    step            optimizer steps done; step n makes policy version n, so it is also the policy version
    batches_taken   steps begun
    done            ids of groups that are done for good
    consumed        sequences of log records that are done for good
    cursor          sequence of the last log record read
    log             identity of the log
    last_read       sequence of the last record ever read from this log, and the time it was stored
    covered         log records below it are done by the newest checkpoint; 1 before the first checkpoint
    next_group_id   ids below it were published
    position        rows of the data read
    overlong        overlong rows among them
    failed_in_a_row  groups that failed since the last one that was buffered
    problem         why the newest of these failed
    has_waited      whether the batch taken last waited, though full, for groups that would become too old
    window          groups that the prompt source keeps outstanding; 0 before the first step, or if always all
    """

    incarnation: int = 0
    step: int = 0
    batches_taken: int = 0
    resume_points: Mapping[int, int] = field(default_factory=dict)
    done: Ledger = field(default_factory=Ledger)
    consumed: Ledger = field(default_factory=lambda: Ledger(watermark=1))  # sequences count from 1
    cursor: int = 0
    log: str = ""
    last_read: tuple[int, int] = (0, 0)
    covered: int = 1
    next_group_id: int = 0
    position: int = 0
    overlong: int = 0
    is_exhausted: bool = False
    outstanding: dict[int, PublishedPrompt] = field(default_factory=dict)
    buffered: dict[int, BufferedGroup] = field(default_factory=dict)
    training: dict[int, BufferedGroup] = field(default_factory=dict)
    counts: dict[Fate, int] = field(default_factory=lambda: dict.fromkeys(FATES, 0))
    counts_before_step: dict[Fate, int] = field(default_factory=dict)
    failed_in_a_row: int = 0
    problem: str = ""
    has_waited: bool = field(default=False, compare=False)
    window: int = field(default=0, compare=False)
    generated_lengths: list[int] = field(default_factory=list)
    dropped_lengths: list[int] = field(default_factory=list)

    # -- events: prompts -----------------------------------------------------------------------------------------------

    def publish(
        self,
        group_id: int,
        *,
        position: int,
        oldest_start: int | None = None,
        overlong: int = 0,
        asked: PromptSpec | None = None,
        time: float = 0.0,
    ) -> None:
        """A prompt is about to be published, or again after the bus lost it. Raises ValueError for an id too high."""
        prompt = PublishedPrompt(position=position, oldest_start=oldest_start, asked=asked, published=time)
        if group_id in self.outstanding:
            self.outstanding[group_id] = prompt
        elif group_id == self.next_group_id:
            self.outstanding[group_id] = prompt
            self.next_group_id = group_id + 1
            self.position = position + 1
            self.overlong = max(self.overlong, overlong)
        elif group_id > self.next_group_id:
            raise ValueError(f"group {group_id} is published before group {self.next_group_id}")

    def exhaust(self, *, position: int, overlong: int) -> None:
        """The data has ended: no more groups will be published."""
        self.position, self.overlong, self.is_exhausted = position, overlong, True

    # -- events: the trajectory log ------------------------------------------------------------------------------------

    def follow_log(self, identity: str) -> None:
        """``identity`` is the log that is read from now on."""
        self.log = identity

    def start_new_log(self, *, first: int = 1) -> None:
        """The log is new, or back at an earlier state, so the known sequences now mean other records.

        It is read again from ``first``. Group ids stay valid. A waiting group has no record until it is read again.
        """
        self.consumed, self.cursor, self.covered = Ledger(watermark=first), first - 1, first
        self.last_read = (0, 0)
        for waiting in (self.buffered, self.training):
            waiting.update({number: replace(one, sequence=first - 1, copies=()) for number, one in waiting.items()})

    def skip(self, before: int) -> list[int]:
        """The log continues at ``before``: the records in between will not come, and must not block trimming.

        Returns the sequences of these records. Their groups stay outstanding.
        """
        if before <= self.cursor + 1:
            return []
        # Example: read up to 7, and the log continues at 10. Records 8 and 9 are consumed, unless a waiting group has
        # one of them: after a log went back, a group may be known by a record that is yet to be read again.
        held = {one.sequence for one in (*self.buffered.values(), *self.training.values())}
        return [s for s in range(self.cursor + 1, before) if s not in held and self.consumed.add(s)]

    def arrive(
        self,
        sequence: int,
        group: TrajectoryGroup | None,
        *,
        now: float,
        is_counted: bool = True,
        stored: int = 0,
    ) -> Arrival:
        """A log record was read. ``group`` is None if it holds no group of this run; a group with an error fails.

        is_counted  as in ``fail``
        stored      time it was stored, as in Record
        """
        self.cursor, self.last_read = sequence, (sequence, stored)
        if sequence in self.consumed:
            return Arrival(became="duplicate")
        if group is None or not self.is_published(group.group_id):
            self.consumed.add(sequence)
            return Arrival(became="rejected")
        group_id = group.group_id
        if group_id not in self.outstanding:
            # A second copy. If the group still waits, its fate decides about this record too (G3); if not, it is over.
            if not self._keep(group_id, sequence):
                self.consumed.add(sequence)
            return Arrival(became="duplicate")
        if group.error:
            self.consumed.add(sequence)
            outcome = self.fail(group_id, error=group.error, worker=group.worker, is_counted=is_counted)
            outcome = replace(outcome, groups=(group,))
            return Arrival(became="failed", outcome=outcome)
        prompt = self.outstanding.pop(group_id)
        versions = [oldest_version(one.version_spans, self.resume_points) for one in group.trajectories]
        self.buffered[group_id] = BufferedGroup(
            sequence=sequence,
            group=group,
            prompt=prompt,
            oldest_version=min(versions),
            newest_trajectory_version=max(versions),
            newest_version=max(newest_version(one, self.resume_points) for one in group.trajectories),
            num_tokens=sum(len(t.tokens) for t in group.trajectories),
            arrived=now,
        )
        self.generated_lengths += _lengths(group)
        self.failed_in_a_row, self.problem = 0, ""
        return Arrival(became="buffered")

    def excuse_failures(self) -> None:
        """The groups that failed in a row came from workers that are no longer trusted, so they do not count."""
        self.failed_in_a_row = 0

    def begin_anew(self) -> None:
        """Everything that an earlier incarnation left in the log is read: its losses do not count towards an end of
        this one."""
        self.counts_before_step = dict(self.counts)
        self.problem = ""

    # -- events: groups that leave the window --------------------------------------------------------------------------

    def fail(self, group_id: int, *, error: str, worker: str = "", is_counted: bool = True) -> Outcome:
        """An outstanding group cannot be made.

        is_counted: whether it counts towards the failures in a row that end the run
        """
        del self.outstanding[group_id]
        self.done.add(group_id)
        self.failed_in_a_row += is_counted
        self.problem = error
        return self._lose("failed", {group_id: {"worker": worker, "error": error}})

    def drop(self, groups: Sequence[BufferedGroup], *, reason: str = "stale") -> Outcome:
        """Buffered groups are too old to train, or come from an untrusted worker."""
        events: dict[int, dict[str, object]] = {}
        for one in groups:
            self._finish(self.buffered.pop(one.group_id))
            lengths = _lengths(one.group)
            if reason == "stale":
                self.dropped_lengths += lengths
            events[one.group_id] = {"reason": reason, "staleness": self.step - one.oldest_version, "lengths": lengths}
        return self._lose("dropped", events, [one.group for one in groups])

    def fail_buffered(self, group_id: int, *, error: str) -> Outcome:
        """A buffered group cannot be trained, because a step with it fails."""
        found = self.buffered.pop(group_id)
        self._finish(found)
        self.problem = error
        return self._lose("failed", {group_id: {"worker": found.group.worker, "error": error}}, [found.group])

    def filter(self, group_id: int, *, by: str = "") -> Outcome:
        """A buffered group has nothing to learn from, according to the filter ``by``."""
        found = self.buffered.pop(group_id)
        self._finish(found)
        return self._lose("filtered", {group_id: {"rewards": found.group.rewards, "by": by}}, [found.group])

    def take(self, groups: Sequence[BufferedGroup], *, has_waited: bool = False) -> None:
        """A step begins on these buffered groups, in the order of the batch."""
        assert not self.training, "one batch is trained at a time"
        self.has_waited = has_waited
        self.training = {one.group_id: self.buffered.pop(one.group_id) for one in groups}
        self.batches_taken += 1

    def put_back(self) -> None:
        """The batch that was taken is not trained. No effect if there is none."""
        if not self.training:
            return
        self.buffered |= self.training
        self.training = {}
        self.batches_taken -= 1

    def trained(self, *, max_staleness: int, old_trajectories: int = 0, old_tokens: int = 0) -> Outcome:
        """The step is done: its groups are trained, and there is a new policy version."""
        group_ids = tuple(self.training)
        sequences = tuple(one.sequence for one in self.training.values())
        groups = tuple(one.group for one in self.training.values())
        for one in self.training.values():
            self._finish(one)
        self.training = {}
        self.counts["trained"] += len(group_ids)
        self.counts_before_step = dict(self.counts)
        self.step += 1
        return Outcome(
            fate="trained",
            group_ids=group_ids,
            sequences=sequences,
            step=self.step,
            max_staleness=max_staleness,
            old_trajectories=old_trajectories,
            old_tokens=old_tokens,
            groups=groups,
        )

    # -- events: checkpoints -------------------------------------------------------------------------------------------

    def checkpointed(self, state: LearnerState) -> int:
        """``state`` is on disk. Returns the last log record that neither it nor the one before it needs; 0 if none."""
        # One checkpoint late. Example: the checkpoint before covered records below 40, this one covers those below 60.
        # Records up to 39 may go; 40 to 59 stay, in case this checkpoint turns out to be damaged.
        through, self.covered = self.covered - 1, state.consumed["watermark"]
        return through

    # -- events: metrics -----------------------------------------------------------------------------------------------

    def take_lengths(self) -> tuple[list[int], list[int]]:
        """Return the token counts of the rollouts buffered, and of those dropped as stale, since the last call."""
        lengths = (self.generated_lengths, self.dropped_lengths)
        self.generated_lengths, self.dropped_lengths = [], []
        return lengths

    # -- queries -------------------------------------------------------------------------------------------------------

    @property
    def policy_version(self) -> int:
        return self.step

    def is_published(self, group_id: int) -> bool:
        """Return whether this run ever asked for the group."""
        return 0 <= group_id < self.next_group_id

    def asked(self, group_id: int) -> PromptSpec | None:
        """Return what the prompt of an outstanding group asks for; None if this incarnation did not publish it."""
        return prompt.asked if (prompt := self.outstanding.get(group_id)) is not None else None

    def awaits(self, sequence: int, group_id: int) -> bool:
        """Return whether a log record is news: its group is outstanding, and the record was not read before."""
        return group_id in self.outstanding and sequence not in self.consumed

    def lost_since_step(self, fate: Fate) -> int:
        """Return how many groups met ``fate`` since the last step of this incarnation, or since it began."""
        return self.counts[fate] - self.counts_before_step.get(fate, 0)

    def describe(self) -> str:
        """Return the counts in human-readable form."""
        text = "{trained} groups trained, {dropped} dropped (stale), {failed} failed".format(**self.counts)
        return text + (f", {self.counts['filtered']} filtered" if self.counts["filtered"] else "")

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _lose(
        self,
        fate: Fate,
        events: Mapping[int, Mapping[str, object]],
        groups: Sequence[TrajectoryGroup] = (),
    ) -> Outcome:
        self.counts[fate] += len(events)
        told = tuple({"group_id": group_id, **event} for group_id, event in events.items())
        return Outcome(fate=fate, group_ids=tuple(events), step=self.step, events=told, groups=tuple(groups))

    def _finish(self, one: BufferedGroup) -> None:
        for sequence in (one.sequence, *one.copies):
            self.consumed.add(sequence)
        self.done.add(one.group_id)

    def _keep(self, group_id: int, sequence: int) -> bool:
        """If the group is buffered or in training, note its log record, do not consume it yet, and return True."""
        for waiting in (self.buffered, self.training):
            if (one := waiting.get(group_id)) is not None:
                if one.sequence in self.consumed:  # its record was lost with a log, and this is another copy
                    waiting[group_id] = replace(one, sequence=sequence)
                elif sequence not in (one.sequence, *one.copies):
                    waiting[group_id] = replace(one, copies=(*one.copies, sequence))
                return True
        return False


def _lengths(group: TrajectoryGroup) -> list[int]:
    return [sum(len(one.tokens) for one in parts) for parts in group.rollouts]
