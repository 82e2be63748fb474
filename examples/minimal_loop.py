"""The whole loop in one process, with every actor and its parts built by hand. Read it from top to bottom.

    python examples/minimal_loop.py     # half a minute on a CPU; the reward rises from 0.1 to 0.99

    prompt source --prompts--> rollout worker --trajectories--> learner --weights--> rollout worker

The arrows are topics on a bus. While the learner trains, the worker continues to sample, and loads new weights between
two tokens. `asyncrl run` builds the same actors from a run file (asyncrl/launch/assembly), in separate processes.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from asyncrl import config
from asyncrl.actors.base import Actor, HeartbeatSender
from asyncrl.actors.learner.batcher import Batcher
from asyncrl.actors.learner.checkpointer import Checkpointer
from asyncrl.actors.learner.group_remover import GroupRemover
from asyncrl.actors.learner.history import History
from asyncrl.actors.learner.learner import Learner
from asyncrl.actors.learner.live_workers import LiveWorkers
from asyncrl.actors.learner.metrics_reporter import MetricsReporter
from asyncrl.actors.learner.progress_reporter import ProgressReporter
from asyncrl.actors.learner.prompt_source import PromptSource
from asyncrl.actors.learner.trainer import Trainer
from asyncrl.actors.learner.trajectory_reader import TrajectoryReader
from asyncrl.actors.learner.validator import Validator
from asyncrl.actors.learner.weight_publisher import WeightPublisher
from asyncrl.actors.rollout.group_maker import GroupMaker
from asyncrl.actors.rollout.partial_rollouts import PartialRollouts
from asyncrl.actors.rollout.shared_engine import SharedEngine
from asyncrl.actors.rollout.training import training_stage
from asyncrl.actors.rollout.weight_follower import WeightFollower
from asyncrl.actors.rollout.worker import RolloutWorker
from asyncrl.actors.supervisor import supervise
from asyncrl.actors.wait_tracker import WaitTracker
from asyncrl.adapters import registry
from asyncrl.backends import reference
from asyncrl.backends.optimizer_settings import OptimizerSettings
from asyncrl.bus.memory.bus import MemoryBus
from asyncrl.data import demo_task
from asyncrl.data.prompts import PromptDataset
from asyncrl.data.tokenizer import load_tokenizer
from asyncrl.engines.inprocess import engine as inprocess
from asyncrl.environments.builtin import single_turn
from asyncrl.messages import SamplingParams
from asyncrl.metrics.sinks import Console, JsonLines
from asyncrl.policies.groups import saved_table
from asyncrl.policies.groups.saved import LearnerState
from asyncrl.policies.staleness.admission import Admission
from asyncrl.rewards.guard import GuardedReward
from asyncrl.weights.files import FilesChannel


async def main(folder: Path, *, steps: int) -> None:
    """Learn the demo's task, to continue a count in octal, from random weights. Writes to ``folder``."""
    demo_task.write(folder)  # a tiny model and 32 prompts
    files = [f'model.path="{folder / "model"}"', f'data.path="{folder / "prompts.jsonl"}"']
    run = config.load(Path(__file__).parent / "demo.toml", [*files, f'run.directory="{folder}"', f"run.steps={steps}"])
    # The bus connects all actors. This bus is in memory; messages are encoded as on the wire.
    bus = MemoryBus(max_prompts=run.window, max_log_bytes=2**28, ack_seconds=30.0, max_message_bytes=2**23)
    # Weight versions are Hugging Face folders that engines load; the bus announces the newest.
    weights = FilesChannel(run.weights_directory, keep=4, model_path=Path(run.model.path))
    learner, prompts = make_learner(run, bus, weights)
    worker, follower = make_worker(run, bus, weights)
    # The first actor leads: when the learner is done, the other actors are stopped. If one fails, all are stopped.
    await supervise(learner, prompts, worker, follower, HeartbeatSender(learner, prompts), HeartbeatSender(worker))


def make_worker(run: config.RunConfig, bus: MemoryBus, weights: FilesChannel) -> tuple[Actor, ...]:
    """Build the actors that take prompts from the bus, sample and reward answers, and publish them."""
    engine = inprocess.InProcessEngine(
        Path(run.model.path), device="cpu", dtype="float32", version=(0, 0), options=inprocess.Options(threads=1)
    )
    # Follows announcements of new weights and makes the engine load them between two tokens ("in_flight").
    follower = WeightFollower("w0.weights", bus, engine=engine, channel=weights, load="in_flight")
    shared = SharedEngine(engine, follower=follower, max_running=64)
    maker = GroupMaker(  # prompt -> rewarded answers
        "w0",
        shared,
        rollout=single_turn,  # makes a trajectory; your own may call the model many times, and tools
        reward=GuardedReward(demo_task.reward, name="demo", takes_group=False, timeout_seconds=30.0),
        tokenizer=load_tokenizer(Path(run.model.path)),
        seed=run.run.seed,
    )
    partial = PartialRollouts(bus, worker="w0", seconds=0, max_attempts=3)  # saves nothing
    stage = training_stage(bus, maker, partial_rollouts=partial, keep_seconds=10.0)  # prompts -> log
    return RolloutWorker("w0", bus, engine=shared, stages=[stage], partial_rollouts=partial), follower


def make_learner(run: config.RunConfig, bus: MemoryBus, weights: FilesChannel) -> tuple[Learner, PromptSource]:
    """Build the actors that publish prompts as staleness allows, read the answers, train, and publish weights."""
    algorithm = registry.algorithm(run)  # GRPO: its advantage, loss, and correction for stale tokens
    backend = reference.ReferenceBackend(
        Path(run.model.path),
        algorithm=algorithm,
        optimizer=OptimizerSettings(weight_decay=0.0, betas=(0.9, 0.95), eps=1e-8, max_grad_norm=1.0),
        temperature=1.0,
        device="cpu",
        dtype="float32",
        threads=1,
        options=reference.Options(),
    )
    # The state of every prompt group, and which groups may be trained now. Only this table holds it.
    table = saved_table.restore(LearnerState.fresh())
    history = History(run.run_directory / "history.jsonl", incarnation=0)
    progress = ProgressReporter(bus, table=table, history=history)
    changed, reconciled, waits = asyncio.Event(), asyncio.Event(), WaitTracker()
    rows = PromptDataset.open(run.data, tokenizer=load_tokenizer(Path(run.model.path)), seed=run.run.seed)
    prompts = PromptSource(  # rows -> prompts, as many as staleness allows: (max_staleness + 1) batches
        "prompts",
        bus,
        rows=rows,
        admission=Admission.from_run(run),
        sampling=SamplingParams(max_new_tokens=run.rollout.max_new_tokens),
        group_size=8,
        table=table,
        changed=changed,
        reconciled=reconciled,
    )
    validator = Validator(bus)  # which groups are accepted
    remover = GroupRemover(table=table, progress=progress, validator=validator, changed=changed, max_failed_in_a_row=32)
    reader = TrajectoryReader(  # log -> table
        bus,
        table=table,
        validator=validator,
        remover=remover,
        progress=progress,
        changed=changed,
        reconciled=reconciled,
    )
    batcher = Batcher(run, table=table, progress=progress, changed=changed, algorithm=algorithm)  # table -> batch
    publisher = WeightPublisher(bus, weights, waits=waits)
    trainer = Trainer(run, backend=backend, algorithm=algorithm, weights=publisher, waits=waits)  # batch -> new weights
    learner = Learner(
        "learner",
        bus,
        run=run,
        table=table,
        reader=reader,
        validator=validator,
        remover=remover,
        batcher=batcher,
        trainer=trainer,
        checkpointer=Checkpointer(run, bus, table=table, trainer=trainer, progress=progress),
        progress=progress,
        metrics=MetricsReporter(bus, [Console(run.run.steps), JsonLines(run.run_directory / "metrics.jsonl")]),
        workers=LiveWorkers(bus),
    )
    return learner, prompts


if __name__ == "__main__":
    asyncio.run(main(Path("runs/minimal"), steps=int(sys.argv[1]) if len(sys.argv) > 1 else 45))
