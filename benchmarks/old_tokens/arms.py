"""All arms of a task and a seed at once, in one tensor program: a run takes a third of a second of a CPU core.

Each arm has a network of its own: the last ``WINDOW`` tokens, one hidden layer, logits. The arms' weights are stacked,
so a step of forty arms costs what a step of one costs in loop.py. Advantage, loss, correction and VCPO's learning rate
are the product's; AdamW, clipping and the token mean are written out here, the same for every arm. Tokens are exactly
as old as the arm says, and all arms draw equal problems and equal random numbers.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from asyncrl.policies.advantages.advantage import AdvantageInputs
from asyncrl.policies.algorithms.algorithm import Algorithm
from asyncrl.policies.corrections.diagnostics import k3_of
from asyncrl.policies.losses.loss import LossInputs
from benchmarks.old_tokens.candidates import damp_repeated
from benchmarks.old_tokens.cells import Cell, Row, share_of_rate
from benchmarks.old_tokens.critic import Critic
from benchmarks.old_tokens.guards import GUARDS
from benchmarks.old_tokens.tasks import CHARACTERS, Problem, Task

WINDOW: Final = 8
_HIDDEN: Final = 48
_PAD: Final = 0
_END: Final = 1
_FIRST: Final = 2
_VOCABULARY: Final = _FIRST + len(CHARACTERS)
_SPREAD: Final = 0.1
_BETA2, _EPS, _MAX_NORM = 0.95, 1e-8, 1.0

EVERY_STEP: Final = ("offpolicy/k3", "entropy")
Weights = list[torch.Tensor]


@dataclass(slots=True)
class Sampled:
    """What A arms sampled for N prompts: K tokens each, of which ``there`` marks those before the end.

    windows  i64[A, N, K, WINDOW], the tokens before each;  tokens i64[A, N, K];  there bool[A, N, K]
    logprobs, entropies  f32[A, N, K] of the policy that sampled
    rewards  f64[A, N]
    """

    windows: torch.Tensor
    tokens: torch.Tensor
    there: torch.Tensor
    logprobs: torch.Tensor
    entropies: torch.Tensor
    rewards: np.ndarray[Any, np.dtype[np.float64]]

    def states(self, arm: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what a critic reads: the places of the ones before each token that is there, and after the last token
        of each answer.  i64[M, WINDOW], i64[N, WINDOW]"""
        windows, tokens, there = self.windows[arm], self.tokens[arm], self.there[arm]
        places = torch.arange(WINDOW) * _VOCABULARY
        answers = torch.arange(len(there))
        last = there.shape[1] - 1 - there.flip(1).long().argmax(1)
        return windows[there] + places, _shifted(windows[answers, last], tokens[answers, last]) + places


def run_arms(
    cells: Sequence[Cell],
    task: Task,
    *,
    algorithms: Mapping[str, Algorithm],
    groups: int = 8,
    group_size: int = 8,
    evaluate_every: int = 10,
    answers: int = 384,
) -> list[Row]:
    """Run cells of one task and seed. Return a row for each.  algorithms: by the name of the guard"""
    seed, steps = cells[0].seed, cells[0].steps
    arms = _Arms(cells, task, algorithms=algorithms, groups=groups, group_size=group_size)
    held_out = list(task.held_out) * max(1, round(answers / len(task.held_out)))
    curves: list[list[tuple[int, float]]] = [[] for _ in cells]
    metrics: list[dict[str, list[float]]] = [collections.defaultdict(list) for _ in cells]

    def examine(step: int) -> None:
        found = arms.sample(arms.weights, held_out, generator=torch.Generator().manual_seed(1))
        for curve, value in zip(curves, found.rewards.mean(1), strict=True):
            curve.append((step, round(float(value), 4)))

    examine(0)
    for step in range(steps):
        rng = np.random.default_rng((seed, step, 1))
        problems = [task.trained[i] for i in rng.integers(len(task.trained), size=groups) for _ in range(group_size)]
        arms.step(problems, step=step, generator=torch.Generator().manual_seed(seed * 100_003 + step))
        for kept, now in zip(metrics, arms.metrics, strict=True):
            for name, value in now.items():
                kept[name].append(value)
        if (step + 1) % evaluate_every == 0 or step + 1 == steps:
            examine(step + 1)
    return [
        {**dataclasses.asdict(cell), "held_out": curve[-1][1], "curve": curve, "metrics": in_short(kept)}
        for cell, curve, kept in zip(cells, curves, metrics, strict=True)
    ]


def in_short(metrics: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Return what a row keeps: each step of what the alarm reads, and means over quarters of the run of the rest."""
    return {
        name: [float(f"{value:.3g}") for value in (values if name in EVERY_STEP else _quarters(values))]
        for name, values in metrics.items()
    }


def _quarters(values: Sequence[float]) -> list[float]:
    return [float(part.mean()) for part in np.array_split(np.array(values), min(4, len(values)))]


class _Arms:
    def __init__(
        self,
        cells: Sequence[Cell],
        task: Task,
        *,
        algorithms: Mapping[str, Algorithm],
        groups: int,
        group_size: int,
    ) -> None:
        self._cells, self._task = cells, task
        self._algorithms = algorithms
        self._groups, self._group_size = groups, group_size
        generator = torch.Generator().manual_seed(cells[0].seed)
        first = [
            torch.randn(WINDOW * _VOCABULARY, _HIDDEN, generator=generator) * _SPREAD,
            torch.zeros(1, _HIDDEN),
            torch.randn(_HIDDEN, _VOCABULARY, generator=generator) * _SPREAD,
            torch.zeros(1, _VOCABULARY),
        ]
        self.weights: Weights = [one.expand(len(cells), *one.shape).clone() for one in first]
        self._versions: list[Weights] = [self.weights]  # 0, 1, ...; those that nothing needs any more are empty
        self._moments = [[torch.zeros_like(one) for one in self.weights] for _ in range(2)]
        self._beta1 = self._of_arms([GUARDS[cell.guard].settings.get("learner.betas", [0.9])[0] for cell in cells])
        self._damps = torch.tensor([GUARDS[cell.guard].damps for cell in cells])[:, None]
        self._before: torch.Tensor | None = None
        self.metrics: list[dict[str, float]] = []
        self._trained = torch.ones(0)
        self._critics = {
            arm: Critic(GUARDS[cell.guard], inputs=WINDOW * _VOCABULARY, rate=cell.rate, seed=cell.seed)
            for arm, cell in enumerate(cells)
            if GUARDS[cell.guard].critic
        }

    def _of_arms(self, values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values)[:, None, None]

    # -- one step ------------------------------------------------------------------------------------------------------

    def step(self, problems: Sequence[Problem], *, step: int, generator: torch.Generator) -> None:
        sampled = self.sample(self._old_weights(step), problems, generator=generator)
        self._trained = self._kept(sampled)
        weights = [one.clone().requires_grad_() for one in self.weights]
        logprobs, entropies = _look_up(weights, sampled.windows, sampled.tokens)
        shares = [1.0] * len(self._cells)
        losses = []
        for arms in self._of_one_objective():
            loss, share = self._objective(arms, sampled, logprobs, entropies, step=step)
            losses.append(loss)
            shares[arms[0]] *= share
        gradients = list(torch.autograd.grad(torch.stack(losses).sum(), weights))
        self._measure(sampled, logprobs.detach(), entropies.detach())
        self._update(gradients, step=step, shares=shares)
        self._versions.append(self.weights)
        oldest = step + 1 - max(cell.staleness for cell in self._cells)
        if oldest > 0:
            self._versions[oldest - 1] = []

    def _old_weights(self, step: int) -> Weights:
        ages = [max(0, step - cell.staleness) for cell in self._cells]
        return [
            torch.stack([self._versions[version][place][arm] for arm, version in enumerate(ages)])
            for place in range(len(self.weights))
        ]

    def _kept(self, sampled: Sampled) -> torch.Tensor:
        """Return which answers each arm trains, bool[A, N]: all but a quarter of the groups where its guard drops."""
        kept = torch.ones(sampled.rewards.shape, dtype=torch.bool)
        lengths = sampled.there.sum(2).view(len(kept), self._groups, -1).double().mean(2)
        for arm, cell in enumerate(self._cells):
            if how := GUARDS[cell.guard].drops:
                order = lengths[arm].argsort(descending=True) if how == "longest" else torch.arange(self._groups)
                kept.view(len(kept), self._groups, -1)[arm, order[: self._groups // 4]] = False
        return kept

    def _of_one_objective(self) -> list[list[int]]:
        """Return the arms that share a call of the objective: those without a guard. Others may look at the batch."""
        plain = [arm for arm, cell in enumerate(self._cells) if cell.guard == "tis"]
        return ([plain] if plain else []) + [[arm] for arm in range(len(self._cells)) if arm not in plain]

    def _objective(
        self, arms: list[int], sampled: Sampled, logprobs: torch.Tensor, entropies: torch.Tensor, *, step: int
    ) -> tuple[torch.Tensor, float]:
        algorithm = self._algorithms[self._cells[arms[0]].guard]
        there = sampled.there[arms] & self._trained[arms][..., None]
        answers = there.shape[1]
        sequence = torch.arange(len(arms) * answers).view(len(arms), answers, 1).expand(there.shape)[there]
        if critic := self._critics.get(arms[0]):  # it is alone
            moved = (logprobs.detach() - sampled.logprobs)[arms][there].double().exp().numpy()
            states, final_states = sampled.states(arms[0])
            advantages = critic.learn(states, final_states, moved, sampled.rewards[arms[0]], sequence.numpy())
        else:
            advantages, _ = algorithm.advantages(
                AdvantageInputs(
                    rewards=sampled.rewards[arms].reshape(-1),
                    group=np.repeat(np.arange(len(arms) * self._groups), self._group_size),
                    sequence=sequence.numpy(),
                )
            )
        ages = torch.tensor([min(step, self._cells[arm].staleness) for arm in arms], dtype=torch.int32)
        staleness = ages[:, None, None].expand(there.shape)[there]
        weights = (1.0 / there.sum((1, 2), keepdim=True)).expand(there.shape)[there]  # a token mean for each arm
        inputs = LossInputs(
            logprobs=logprobs[arms][there],
            entropy=entropies[arms][there],
            behavior_logprobs=sampled.logprobs[arms][there],
            advantages=torch.from_numpy(advantages),
            loss_weights=weights,
            is_fresh=staleness == 0,
            staleness=staleness,
            sequence=sequence,
            num_sequences=len(arms) * answers,
            model_outputs={"behavior_entropy": sampled.entropies[arms][there]},
        )
        loss, sums = algorithm.objective(inputs)
        return loss, algorithm.learning_rate_share(sums)

    def _update(self, gradients: Weights, *, step: int, shares: Sequence[float]) -> None:
        """Clip each arm's gradient to a norm of 1 and take its step of AdamW, without weight decay."""
        arms = len(self._cells)
        norms = torch.sqrt(sum((one.square().sum((1, 2)) for one in gradients), torch.zeros(arms)))
        scale = (_MAX_NORM / (norms + 1e-6)).clamp(max=1.0)[:, None, None]
        flat = torch.cat([(one * scale).flatten(1) for one in gradients], 1)
        flat = self._damped(flat)
        clipped = [
            part.view(one.shape)
            for part, one in zip(torch.split(flat, [one[0].numel() for one in gradients], 1), gradients, strict=True)
        ]
        rates = [
            cell.rate * share * share_of_rate(cell, step=step) for cell, share in zip(self._cells, shares, strict=True)
        ]
        rate, count = self._of_arms(rates), step + 1
        first, second = self._moments
        made = []
        for place, gradient in enumerate(clipped):
            first[place] = self._beta1 * first[place] + (1 - self._beta1) * gradient
            second[place] = _BETA2 * second[place] + (1 - _BETA2) * gradient.square()
            mean = first[place] / (1 - self._beta1**count)
            made.append(self.weights[place] - rate * mean / ((second[place] / (1 - _BETA2**count)).sqrt() + _EPS))
        self.weights = made

    def _damped(self, flat: torch.Tensor) -> torch.Tensor:
        """Measure the cosine of successive gradients, and change those of GAC's arms."""
        before, self._before = self._before, flat
        if before is None:
            return flat
        cosine = torch.nn.functional.cosine_similarity(flat, before, dim=1)
        momentum = torch.cat([one.flatten(1) for one in self._moments[0]], 1)
        with_momentum = torch.nn.functional.cosine_similarity(flat, momentum, dim=1)
        for metrics, one, other in zip(self.metrics, cosine.tolist(), with_momentum.tolist(), strict=True):
            metrics |= {"cosine": one, "momentum_cosine": other}
        return torch.where(self._damps, damp_repeated(flat, before), flat)

    def _measure(self, sampled: Sampled, logprobs: torch.Tensor, entropies: torch.Tensor) -> None:
        moved = (logprobs - sampled.logprobs).masked_fill(~sampled.there, 0.0)
        tokens = sampled.there.sum((1, 2))
        ratios = moved.sum(2).clamp(-20, 20).exp()
        ess = ratios.sum(1).square() / ratios.square().sum(1) / ratios.shape[1]
        columns = {
            "reward/mean": torch.from_numpy(sampled.rewards.mean(1)),
            "entropy": entropies.masked_fill(~sampled.there, 0.0).sum((1, 2)) / tokens,
            "mismatch/mean": moved.abs().sum((1, 2)) / tokens,
            "offpolicy/k3": k3_of(moved.double()).sum((1, 2)) / tokens,
            "offpolicy/sequence_ess": ess,
            "length": tokens / ratios.shape[1],
        }
        columns["length_trained"] = (sampled.there.sum(2) * self._trained).sum(1) / self._trained.sum(1)
        columns["reward_trained"] = (torch.from_numpy(sampled.rewards) * self._trained).sum(1) / self._trained.sum(1)
        lists = {name: column.tolist() for name, column in columns.items()}
        self.metrics = [{name: values[arm] for name, values in lists.items()} for arm in range(len(self._cells))]

    # -- sampling ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def sample(self, weights: Weights, problems: Sequence[Problem], *, generator: torch.Generator) -> Sampled:
        """Return one rollout of every arm for each problem. All arms get the same random numbers."""
        arms, answers = len(self._cells), len(problems)
        windows = torch.tensor([_window(problem.prompt) for problem in problems]).expand(arms, -1, -1).contiguous()
        said: list[list[list[str]]] = [[[] for _ in problems] for _ in range(arms)]
        steps: list[tuple[torch.Tensor, ...]] = []
        goes_on = torch.ones(arms, answers, dtype=torch.bool)
        while bool(goes_on.any()):
            speaks, texts = goes_on.clone(), []
            for _ in range(self._task.turn_tokens):
                distribution = _distribution(weights, windows)
                uniform = torch.rand(answers, _VOCABULARY, generator=generator).clamp(min=1e-20)
                tokens = (distribution - (-uniform.log()).log()).argmax(-1)  # Gumbel's trick
                logprobs = distribution.gather(-1, tokens[..., None])[..., 0]
                entropies = -(distribution.exp() * distribution).sum(-1)
                steps.append((windows, tokens, speaks.clone(), logprobs, entropies))
                texts.append(tokens.where(speaks, _END))
                windows = torch.where(speaks[..., None], _shifted(windows, tokens), windows)
                speaks = speaks & (tokens != _END)
                if not bool(speaks.any()):
                    break
            replies = torch.zeros(arms, answers, dtype=torch.long)
            columns = torch.stack(texts, -1).tolist()
            for arm, answer in goes_on.nonzero().tolist():
                said[arm][answer].append(_text(columns[arm][answer]))
                if reply := self._task.reply(problems[answer], said[arm][answer]):
                    replies[arm, answer] = _FIRST + CHARACTERS.index(reply)
            goes_on = replies > 0
            windows = torch.where(goes_on[..., None], _shifted(windows, replies), windows)
        before, tokens, there, logprobs, entropies = (torch.stack(column, 2) for column in zip(*steps, strict=True))
        rewards = [[self._task.reward(p, its) for p, its in zip(problems, of, strict=True)] for of in said]
        return Sampled(before, tokens, there, logprobs, entropies, np.array(rewards))


def _distribution(weights: Weights, windows: torch.Tensor) -> torch.Tensor:
    """Return log-probabilities of the next token.  i64[A, R, WINDOW] -> f32[A, R, V]"""
    places = torch.arange(WINDOW) * _VOCABULARY
    rows = windows + places
    inputs = torch.zeros(*windows.shape[:2], WINDOW * _VOCABULARY).scatter_(-1, rows, 1.0)
    hidden = torch.tanh(torch.baddbmm(weights[1], inputs, weights[0]))
    return torch.log_softmax(torch.baddbmm(weights[3], hidden, weights[2]), -1)


def _look_up(weights: Weights, windows: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logprob and entropy of tokens.  i64[A, N, K, WINDOW], i64[A, N, K] -> f32[A, N, K] x 2"""
    distribution = _distribution(weights, windows.flatten(1, 2)).view(*tokens.shape, -1)
    logprobs = distribution.gather(-1, tokens[..., None])[..., 0]
    return logprobs, -(distribution.exp() * distribution).sum(-1)


def _shifted(windows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return torch.cat([windows[..., 1:], tokens[..., None]], -1)


def _window(text: str) -> list[int]:
    tokens = [_FIRST + CHARACTERS.index(one) for one in text][-WINDOW:]
    return [_PAD] * (WINDOW - len(tokens)) + tokens


def _text(tokens: Sequence[int]) -> str:
    """Return the text before the end token; a token that is no character counts as a blank."""
    ends = tokens.index(_END) if _END in tokens else len(tokens)
    return "".join(CHARACTERS[one - _FIRST] if one >= _FIRST else " " for one in tokens[:ends])
