"""Chooses machines of a cluster for processes. Pure: machines and needs in, a choice or a refusal out.

Each process is placed separately, so that a fleet can grow, shrink and heal one process at a time. ``strategy`` places
a process relative to the run's other processes:

    PACK           with as many of them as there is room for
    SPREAD         with as few of them as there is room for
    STRICT_PACK    all on one machine
    STRICT_SPREAD  each on its own machine
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from asyncrl.messages.roles import LEARNER

Strategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
Resources = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A machine that is up.  capacity: all its resources, used or not"""

    id: str
    address: str
    capacity: Resources
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Resources that one process takes of one machine, and labels that the machine must have.

    labels    values may use ``!``, ``in()`` and ``!in()`` as in Ray
    beside    process whose machine it must share, whatever the strategy
    apart     processes whose machines it must not share
    """

    name: str
    resources: Resources
    labels: Mapping[str, str] = field(default_factory=dict)
    beside: str = ""
    apart: tuple[str, ...] = ()

    @property
    def party(self) -> str:
        """Name of the group of processes that share a machine; the same for all of them."""
        return self.beside or self.name

    def fits(self, machine: Machine) -> bool:
        """Whether the process could run there if the machine were empty."""
        return is_within(self.resources, machine.capacity) and all(
            wanted.startswith(("!", "in(")) or machine.labels.get(key) == wanted for key, wanted in self.labels.items()
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Machines by id.  within: allowed machines; empty: all;  without: forbidden machines;  near: preferred machine"""

    within: frozenset[str] = frozenset()
    without: frozenset[str] = frozenset()
    near: str = ""

    def may_come_true(self, machines: Iterable[Machine]) -> bool:
        """Whether an allowed machine is up."""
        return any((not self.within or one.id in self.within) and one.id not in self.without for one in machines)


def choose(
    need: Need,
    *,
    strategy: Strategy,
    machines: Sequence[Machine],
    ours: Sequence[str],
    planned: Sequence[Need],
    beside: str = "",
    apart: Collection[str] = (),
) -> Choice:
    """Choose the machines for ``need``.

    ours     machine of each of the run's other placed processes
    planned  everything that the run will have at once, for the first process to be placed
    beside   machine on which it must run, if any
    apart    machines on which it must not run
    """
    if beside:
        return Choice(within=frozenset((beside,)))
    without = frozenset(apart)
    there = [one for one in machines if need.fits(one) and one.id not in without]
    taken = frozenset(ours)
    if strategy == "STRICT_SPREAD":
        return Choice(without=taken | without)
    if strategy == "STRICT_PACK":
        whole = total(planned)
        fitting = frozenset(one.id for one in there if is_within(whole, one.capacity))
        return Choice(within=taken or fitting, without=without)
    if not there or not taken:
        return Choice(without=without)
    by_company = sorted(there, key=lambda one: (ours.count(one.id), one.id))
    return Choice(without=without, near=by_company[0 if strategy == "SPREAD" else -1].id)


def refusal(needs: Sequence[Need], *, strategy: Strategy, machines: Sequence[Machine]) -> str:
    """Why these can never run at once on these machines, in one line; empty if no reason is known."""
    have = total_capacity(machines)
    for need in needs:
        if not any(need.fits(one) for one in machines):
            labels = "".join(f", {key} = {value}" for key, value in need.labels.items())
            largest = "; ".join(f"{one.address} {amounts(one.capacity, like=need.resources)}" for one in machines)
            return f"{need.name} needs {amounts(need.resources)}{labels} on one machine; there is {largest or 'none'}"
    asked, names = total(needs), f"{len(needs)} processes ({needs[0].name} ... {needs[-1].name})" if needs else ""
    if not is_within(asked, have):
        return f"{names} need {amounts(asked)}; the cluster has {amounts(have, like=asked)} on {len(machines)} machines"
    if strategy == "STRICT_PACK" and not any(is_within(asked, one.capacity) for one in machines):
        largest = "; ".join(f"{one.address} {amounts(one.capacity, like=asked)}" for one in machines)
        return f"STRICT_PACK: {names} need {amounts(asked)} on one machine; there is {largest}"
    parties = sum(not need.beside for need in needs)
    if strategy == "STRICT_SPREAD" and parties > len(machines):
        return f"STRICT_SPREAD: {names} need {parties} machines; the cluster has {len(machines)}"
    return _refusal_of_those_apart(needs, strategy=strategy, machines=machines)


def _refusal_of_those_apart(needs: Sequence[Need], *, strategy: Strategy, machines: Sequence[Machine]) -> str:
    """As ``refusal``, for processes that need separate machines, each with the processes that share its machine."""
    for leader in needs:
        count = 1 + len(leader.apart)
        key = f"{'learner' if leader.name.startswith(LEARNER) else 'engine.options'}.machines = {count}"
        if count == 1:
            continue
        if strategy == "STRICT_PACK":
            return f"STRICT_PACK: {key} are to be as many machines"
        whole = total(need for need in needs if need.party == leader.party)
        fitting = [one for one in machines if leader.fits(one) and is_within(whole, one.capacity)]
        if len(fitting) < count:
            return f"{key} need as many machines with {amounts(whole)}; the cluster has {len(fitting)}"
    return ""


def is_within(asked: Resources, have: Resources) -> bool:
    return all(have.get(key, 0.0) >= amount for key, amount in asked.items())


def total(needs: Iterable[Need]) -> dict[str, float]:
    found: dict[str, float] = {}
    for need in needs:
        for key, amount in need.resources.items():
            found[key] = found.get(key, 0.0) + amount
    return found


def total_capacity(machines: Iterable[Machine]) -> dict[str, float]:
    return total(Need(name=one.id, resources=one.capacity) for one in machines)


def amounts(resources: Resources, *, like: Resources | None = None) -> str:
    """Format resources for a person: ``1 CPU, 2 GPU``. With ``like``, only the kinds in it."""
    kinds = resources if like is None else like
    return ", ".join(f"{resources.get(key, 0.0):g} {key}" for key in kinds) or "nothing"
