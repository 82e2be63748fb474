"""[staleness] of the run file: how old a token may be, and what happens to older groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from asyncrl.config.checks import OrNoLimit, Positive, require

Discard = Literal["groups", "trajectories", "tokens"]
"""What is not trained because a token is too old: its group, its trajectory, or only the token."""


_WAITING_ORDERS: Final = ("oldest_first", "in_order")
"""Orders that train the oldest groups in time, so that it helps to wait for one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessSection:
    max_staleness: int | Literal["auto"] = "auto"
    """Maximum age of a trained token, in policy versions. 0 is synchronous RL. auto: the largest from 1 to 8 at which
    learner.learning_rate x age is at most 2e-5, up to which nothing lost where it was measured: 8 up to 2.5e-6, 4 at
    5e-6, 2 at 1e-5, 1 above. Rates from 1e-3 on, of small models with random weights: 4 up to 3e-3, 2 at 5e-3, 1 at
    1e-2. The rate counts learner.steps_per_batch times. Adapters: 4 (docs/results/old_tokens.md)."""
    admission: Literal["needed", "full"] = "needed"
    """How many groups are outstanding in async. needed: as many as keep the learner fed, so tokens are as young as they
    can be at no cost. full: always (max_staleness + 1) x groups_per_batch, as with order = "in_order"; needed never
    exceeds that."""
    eviction: Literal["", "wait", "drop"] = ""
    """What happens to a group that is still being generated and would become too old. wait: the learner waits for it.
    drop: it is dropped. Empty: drop with order = "freshest_first" or one of your own, or with discard = "trajectories"
    or "tokens"; otherwise wait."""
    wait_seconds: OrNoLimit[float] = 300.0
    """Maximum time that a step waits for such groups; then it trains without them. 0: no limit."""
    order: str = "oldest_first"
    """Order in which buffered groups are trained. oldest_first; freshest_first: lowest staleness, but slow groups
    are dropped; in_order: of their prompts, so one straggler holds up all; or "package.module:function" that returns
    a key of (group, oldest_version): the lowest are trained first."""
    discard: Discard = "groups"
    """What is not trained because of tokens that are too old. groups: the whole group. trajectories: only the
    trajectories with such a token (for rollouts of several parts). tokens (async only): only these tokens. All
    rewards stay in the baseline."""
    weight: Literal["", "exponential", "inverse", "linear"] = ""
    """Loss weight of a token that is s versions old. exponential: exp(-weight_rate s). inverse: 1 / (1 + s). linear: 1
    - s / (max_staleness + 1). It does not replace a correction (algorithm.correction)."""
    weight_rate: Positive[float] = 0.2
    """Rate of weight = "exponential"."""
    learning_rate: Literal["", "ess_sqrt", "ess_linear"] = ""
    """VCPO: scale the learning rate by the effective sample size (ESS) of the batch, or by its square root. The ESS is
    offpolicy/sequence_ess: it is computed from untruncated sequence ratios, as a share of the answers."""

    def __post_init__(self) -> None:
        require(
            self.max_staleness == "auto" or self.max_staleness >= 0,
            f'max_staleness must be "auto" or >= 0 (0 trains on-policy), got {self.max_staleness}',
        )
        require(
            self.order in _WAITING_ORDERS or self.eviction != "wait",
            f'order = "{self.order}" passes over the old groups that eviction = "wait" waits for; use "drop"',
        )
        require(
            self.discard == "groups" or self.eviction != "wait",
            f'discard = "{self.discard}" leaves out what eviction = "wait" waits for; use "drop"',
        )

    @property
    def waits(self) -> bool:
        """Whether the learner waits for groups that would become too old."""
        drops = self.order not in _WAITING_ORDERS or self.discard != "groups"
        return self.eviction == "wait" or (self.eviction == "" and not drops)

    def check(self, *, mode: str) -> None:
        """Check the settings that depend on other sections. Raises ConfigError."""
        require(
            mode == "async" or self.discard != "tokens",
            f'staleness: discard = "tokens" needs run.mode = "async": {mode} trains no answer of several versions',
        )
