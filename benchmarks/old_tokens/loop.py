"""The loop of a run in one process, with tokens that are exactly as old as wanted.

Step n trains weights of version n on a batch that weights of version max(0, n - staleness) sampled: what a learner
that is the limit does with a full window. Everything of the learner is the product's (batch, packing, algorithm,
backend, step); workers, bus and clock are left out, so nothing depends on the machine's load. Nothing is dropped: what
is trained is what was sampled. Equal seeds draw equal problems and equal random numbers in all arms.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from asyncrl.actors.learner.preparation import prepare
from asyncrl.actors.learner.training_step import train_batch
from asyncrl.adapters import registry
from asyncrl.backends.reference import ReferenceBackend
from asyncrl.data.tokenizer import load_tokenizer
from asyncrl.messages import Trajectory, TrajectoryGroup, VersionSpan
from asyncrl.policies.batching.hooks import Hooks
from benchmarks.old_tokens.arms import in_short
from benchmarks.old_tokens.candidates import damp_repeated
from benchmarks.old_tokens.cells import Cell, Row, configure, share_of_rate
from benchmarks.old_tokens.guards import GUARDS
from benchmarks.old_tokens.sampler import Sampled, Sampler
from benchmarks.old_tokens.tasks import Problem, Task, encode, make_model

Weights = dict[str, torch.Tensor]

KEPT: Final = (
    "reward/mean",
    "entropy",
    "mismatch/mean",
    "offpolicy/k3",
    "offpolicy/sequence_ess",
    "offpolicy/masked_fraction",
    "cosine",
    "momentum_cosine",
)
"""The metrics of each step in a row, as far as the backend shows them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What all runs share.

    model     folder of a real model; None: a tiny one, with random weights for each seed
    scratch   folder for models
    dtype     of learner and sampler; the optimizer's weights are float32
    warm_up   steps in which the learning rate rises to the cell's
    answers   so many answers to held-out problems in an evaluation, or one to each if they are more
    problems  most held-out problems; 0: all
    graphs    whether a sampler on a GPU has CUDA graphs
    """

    scratch: Path
    model: Path | None = None
    device: str = "cpu"
    dtype: str = "float32"
    backend: str = "reference"
    threads: int = 1
    warm_up: int = 0
    groups: int = 8
    group_size: int = 8
    evaluate_every: int = 10
    answers: int = 192
    problems: int = 0
    graphs: bool = True


class Loop:
    def __init__(self, cell: Cell, task: Task, scene: Scene) -> None:
        self._cell, self._task, self._scene = cell, task, scene
        folder = scene.model or first_model(cell.seed, scene)
        self._tokenizer = load_tokenizer(folder)
        self._prompts: dict[Problem, list[int]] = {}
        settings = {
            "model.path": folder,
            "model.dtype": scene.dtype,
            "rollout.group_size": scene.group_size,
            "learner.groups_per_batch": scene.groups,
            "learner.backend": scene.backend,
            "learner.device": scene.device,
            "learner.threads": scene.threads,
        }
        self._run = configure(cell, settings)
        self._algorithm = registry.algorithm(self._run)
        self._needs_entropies = "model_outputs" in self._algorithm.loss.inputs
        self._backend = registry.backend(self._run)
        self._shares_prefixes = registry.shared_prefixes(self._run).is_on
        self._sampler = sampler(scene, folder)
        self._held_out = list(task.held_out)[: scene.problems or None]
        self._gradients = Gradients(damps=GUARDS[cell.guard].damps)

    def run(self) -> Row:
        """Train, and return the row."""
        started, began = time.process_time(), time.monotonic()
        cell, backend = self._cell, self._backend
        backend.start()
        try:
            row = self._row()
        finally:
            backend.close()
        seconds = {"cpu_seconds": time.process_time() - started, "seconds": time.monotonic() - began}
        return {**dataclasses.asdict(cell), **row, **{name: round(value, 1) for name, value in seconds.items()}}

    def _row(self) -> Row:
        cell, backend = self._cell, self._backend
        if isinstance(backend, ReferenceBackend):
            self._gradients.attach(backend)
        held: collections.deque[Weights] = collections.deque(maxlen=cell.staleness + 1)  # oldest first
        held.append(self._weights())
        steps: list[dict[str, float]] = []
        exam = self._exam(held[-1])
        curve = [(0, exam["held_out"])]
        trained: collections.Counter[str] = collections.Counter()
        for step in range(cell.steps):
            version = max(0, step - cell.staleness)
            groups = self._sampled(step, version=version, weights=held[0])
            trained.update(group.label for group in groups)
            metrics = self._trained(groups, step=step)
            steps.append({name: metrics[name] for name in KEPT if name in metrics})
            held.append(self._weights())
            if (step + 1) % self._scene.evaluate_every == 0 or step + 1 == cell.steps:
                exam = self._exam(held[-1])
                curve.append((step + 1, exam["held_out"]))
        shown = set().union(*steps)
        return {
            **exam,
            "curve": curve,
            "trained": trained,
            "metrics": in_short({name: [one.get(name, 0.0) for one in steps] for name in KEPT if name in shown}),
        }

    def _weights(self) -> Weights:
        """Return a copy of the weights on the device, so that the backend keeps none of its own."""
        return {name: tensor.to(self._scene.device, copy=True) for name, tensor in self._backend.export().tensors()}

    def _sampled(self, step: int, *, version: int, weights: Weights) -> list[TrajectoryGroup]:
        """Return the batch of a step, sampled by ``weights``."""
        cell, size = self._cell, self._scene.group_size
        rng = np.random.default_rng((cell.seed, step, 1))
        problems = [self._task.trained[i] for i in rng.integers(len(self._task.trained), size=self._scene.groups)]
        self._sampler.load(weights.items())
        rollouts = self._rollouts([one for one in problems for _ in range(size)], seed=cell.seed * 100_003 + step)
        return [
            TrajectoryGroup(
                group_id=step * self._scene.groups + index,
                prompt_tokens=np.array(self._prompt(problem), np.int32),
                trajectories=tuple(
                    self._trajectory(problem, one, version=version)
                    for one in rollouts[index * size : (index + 1) * size]
                ),
                label=problem.kind,
            )
            for index, problem in enumerate(problems)
        ]

    def _rollouts(self, problems: Sequence[Problem], *, seed: int) -> list[Sampled]:
        return self._sampler.sample(
            [self._prompt(one) for one in problems],
            replies=[partial(self._task.reply, one) for one in problems],
            turn_tokens=self._task.turn_tokens,
            generator=torch.Generator(self._scene.device).manual_seed(seed),
        )

    def _prompt(self, problem: Problem) -> list[int]:
        if problem not in self._prompts:
            self._prompts[problem] = encode(self._task, problem, self._tokenizer)
        return self._prompts[problem]

    def _trajectory(self, problem: Problem, sampled: Sampled, *, version: int) -> Trajectory:
        return Trajectory(
            tokens=np.array(sampled.tokens, np.int32),
            response_mask=np.array(sampled.is_policy, np.bool_),
            behavior_logprobs=np.array(sampled.logprobs, np.float32),
            version_spans=(VersionSpan(start=0, incarnation=0, policy_version=version),),
            reward=self._task.reward(problem, sampled.said),
            finish_reason="length" if sampled.is_cut else "stop",
            # no message has entropies, so they travel where a served teacher's logprobs do (_with_entropies)
            teacher_logprobs=-np.array(sampled.entropies if self._needs_entropies else [], np.float32),
        )

    def _trained(self, groups: Sequence[TrajectoryGroup], *, step: int) -> dict[str, float]:
        """Take the step, as the learner does."""
        batch, mini_batches = prepare(
            groups,
            run=self._run,
            algorithm=self._algorithm,
            hooks=Hooks(),
            image_reader=None,
            shares_prefixes=self._shares_prefixes,
            policy_version=step,
            max_staleness=self._cell.staleness,
            resume_points={},
        )
        if self._needs_entropies:
            mini_batches = [[[_with_entropies(one) for one in share] for share in of] for of in mini_batches]
        result = train_batch(
            self._backend,
            batch,
            mini_batches,
            algorithm=self._algorithm,
            step=step,
            learning_rate=self._cell.rate * share_of_rate(self._cell, step=step, warm_up=self._scene.warm_up),
        )
        found = {name: float(value) for name, value in batch.metrics.items() if isinstance(value, float)}
        return found | dict(result.metrics) | self._gradients.metrics

    def _exam(self, weights: Weights) -> Row:
        """Return the mean reward on the held-out problems at temperature 1, its error over problems, and that of each
        kind; equal random numbers in all arms."""
        self._sampler.load(weights.items())
        each = max(1, round(self._scene.answers / len(self._held_out)))
        problems = self._held_out * each
        rollouts = self._rollouts(problems, seed=1)
        rewards = np.array(
            [self._task.reward(problem, one.said) for problem, one in zip(problems, rollouts, strict=True)]
        )
        of_problem = rewards.reshape(each, -1).mean(0)
        kinds = {
            kind: float(np.mean([one for one, its in zip(of_problem, self._held_out, strict=True) if its.kind == kind]))
            for kind in dict.fromkeys(one.kind for one in self._held_out)
        }
        return {
            "held_out": round(float(of_problem.mean()), 4),
            "held_out_error": round(float(of_problem.std(ddof=1) / len(of_problem) ** 0.5), 4),
            "held_out_of": {kind: round(value, 4) for kind, value in kinds.items()},
        }


class Gradients:
    """Looks at the clipped gradients before AdamW's update: their cosine with those of the step before and with its
    first moment. With ``damps``, GAC changes them."""

    def __init__(self, *, damps: bool) -> None:
        self._damps = damps
        self._before: torch.Tensor | None = None
        self.metrics: dict[str, float] = {}

    def attach(self, backend: ReferenceBackend) -> None:
        optimizer = backend._trained["policy"]._optimizer  # no port has gradients
        optimizer.register_step_pre_hook(lambda one, *_: self._look(one))

    def _look(self, optimizer: torch.optim.Optimizer) -> None:
        weights = [one for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
        gradient = torch.cat([one.grad.flatten() for one in weights if one.grad is not None])[None]
        before, self._before = self._before, gradient
        if before is None:
            return
        moments = torch.cat([optimizer.state[one]["exp_avg"].flatten() for one in weights])[None]
        of_both = [torch.nn.functional.cosine_similarity(gradient, one, dim=1) for one in (before, moments)]
        self.metrics = dict(zip(("cosine", "momentum_cosine"), map(float, of_both), strict=True))
        if self._damps:
            parts = torch.split(damp_repeated(gradient, before)[0], [one.numel() for one in weights])
            for weight, part in zip(weights, parts, strict=True):
                weight.grad = part.view(weight.shape)


def _with_entropies(micro_batch: Any) -> Any:
    """Give the loss the entropies of the policy that sampled, from the place in which they travelled."""
    entropies = -micro_batch.model_outputs["teacher_logprobs"]
    return dataclasses.replace(micro_batch, model_outputs={"behavior_entropy": entropies})


@functools.lru_cache(maxsize=1)
def sampler(scene: Scene, folder: Path) -> Sampler:
    """Return the sampler of a model. The runs of a process share it: on a GPU it is slow to make."""
    return Sampler(
        folder,
        tokenizer=load_tokenizer(folder),
        device=scene.device,
        dtype=getattr(torch, scene.dtype),
        graphs=scene.graphs,
    )


def first_model(seed: int, scene: Scene) -> Path:
    """Return the tiny model with the seed's random weights."""
    folder = scene.scratch / f"model-{seed}"
    return folder if (folder / "model.safetensors").exists() else make_model(folder, seed=seed)
