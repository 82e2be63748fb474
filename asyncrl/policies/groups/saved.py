"""What a checkpoint keeps of a learner besides its backend: plain numbers, as stored in learner.json."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptState:
    """The position of the prompt source.

    next_group_id  id of the next group to publish
    position       rows of the endless shuffled data read so far, including overlong ones
    overlong       overlong rows among them
    outstanding    group id -> position of each group that is published and not done; published again if the bus lost it
    oldest_start   group id -> oldest policy version that may sample it
    """

    next_group_id: int = 0
    position: int = 0
    overlong: int = 0
    outstanding: dict[int, int] = field(default_factory=dict)
    oldest_start: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerState:
    """The saved group table.

    groups, consumed  ids of done groups, and sequences of done log records, as ``Ledger.as_json``
    history           length of history.jsonl in bytes
    log               identity of the trajectory log, and sequence and time of the last record read; {} in old states
    """

    incarnation: int
    step: int
    policy_version: int
    groups: dict[str, Any]
    consumed: dict[str, Any]
    prompts: PromptState
    groups_trained: int = 0
    groups_dropped: int = 0
    groups_failed: int = 0
    groups_filtered: int = 0
    groups_per_batch: int = 0
    forks: dict[int, int] = field(default_factory=dict)
    history: int = 0
    log: dict[str, Any] = field(default_factory=dict)

    def problem(self) -> str:
        """Return why no table can have saved this, in words; empty if the numbers are consistent (G2 of table.py)."""
        prompts = self.prompts
        numbers = {name: getattr(self, name) for name in _NUMBERS}
        numbers |= {name: getattr(prompts, name) for name in ("next_group_id", "position", "overlong")}
        tables = {"forks": self.forks, "outstanding": prompts.outstanding, "oldest_start": prompts.oldest_start}
        for name, number in numbers.items():
            if not _is_count(number):
                return f"{name} is {number!r}"
        for name, table in tables.items():
            if not all(_is_count(number) for pair in table.items() for number in pair):
                return f"{name} has a number below 0 or none"
        if self.policy_version != self.step:
            return f"policy version {self.policy_version} after {self.step} steps"
        if any(incarnation > self.incarnation or version > self.step for incarnation, version in self.forks.items()):
            return f"forks {self.forks} in incarnation {self.incarnation} after {self.step} steps"
        log = {"identity": "", "sequence": 0, "stored": 0, **self.log}
        if len(log) > 3 or not isinstance(log["identity"], str) or not all(map(_is_count, list(log.values())[1:])):
            return f"log is {self.log}"
        return _problem_of_ledger("consumed", self.consumed) or self._problem_of_groups()

    def _problem_of_groups(self) -> str:
        if problem := _problem_of_ledger("groups", self.groups):
            return problem
        published, outstanding = self.prompts.next_group_id, self.prompts.outstanding
        watermark, beyond = self.groups["watermark"], self.groups["beyond"]
        done = watermark + len(beyond)
        fates = self.groups_trained + self.groups_dropped + self.groups_failed + self.groups_filtered
        if done != fates:
            return f"{done} groups are done, and {fates} met a fate"
        if done + len(outstanding) != published or max([watermark - 1, *beyond, *outstanding]) >= published:
            return f"{done} groups are done and {len(outstanding)} outstanding of {published} published"
        if any(group_id < watermark for group_id in outstanding) or not outstanding.keys().isdisjoint(beyond):
            return "a group is done and outstanding"
        if any(position >= self.prompts.position for position in outstanding.values()):
            return f"position {self.prompts.position} is before that of an outstanding group"
        return ""

    @classmethod
    def fresh(cls) -> LearnerState:
        """Return the state of a run that has not begun."""
        return cls(
            incarnation=0,
            step=0,
            policy_version=0,
            groups={"watermark": 0, "beyond": []},
            consumed={"watermark": 1, "beyond": []},
            prompts=PromptState(),
        )


_NUMBERS: Final = (
    *("incarnation", "step", "policy_version", "groups_per_batch", "history"),
    *("groups_trained", "groups_dropped", "groups_failed", "groups_filtered"),
)


def _problem_of_ledger(name: str, ledger: Any) -> str:
    """Check a ledger in the form of ``Ledger.as_json``."""
    if not isinstance(ledger, dict) or ledger.keys() != {"watermark", "beyond"}:
        return f"{name} is not a ledger"
    watermark, beyond = ledger["watermark"], ledger["beyond"]
    if not _is_count(watermark) or not isinstance(beyond, list) or not all(map(_is_count, beyond)):
        return f"{name} has a number below 0 or none"
    if len(set(beyond)) != len(beyond) or any(number <= watermark for number in beyond):
        return f"{name} has numbers beyond {watermark} that are not"
    return ""


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0
