"""Run files for storms, with answers that are short or long compared with the time between two kills.

short  the tiny net of the staleness benchmark: six tokens per answer, ten steps per second
long   a tiny Hugging Face model on the in-process engine and the reference backend: 400 tokens per answer, 10 s each;
       a killed worker always has unfinished answers, and a learner restarts before the window is full
ranks  a tiny mixture of experts; its learner has two pipeline stages on two "machines", each with experts on two ranks
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from asyncrl.data import demo_task
from asyncrl.data.tiny_model import make_tiny_model
from tests.harness.tiny import files as tiny_files
from tests.harness.tiny.task import Policy

COMMON: Final = """
[run]
name = "storm"
directory = "{folder}/runs"
steps = 1000000
seed = {seed}
restarts = 6

[model]
path = "{folder}/model"

[data]
path = "{folder}/prompts.jsonl"

[bus]
port = {port}
ack_seconds = 3.0

[checkpoint]
every_steps = 3

[metrics]
console = false
mismatch_alarm = 0.0
"""

SHORT: Final = """
[rollout]
workers = 3
group_size = 4
max_new_tokens = 6
max_running = 32
reissue_seconds = 2  # under kills and liars that keep prompts

[engine]
kind = "tests.chaos.metered_net:MeteredNet"
device = "cpu"
options = {{ step_seconds = 0.05, meter = "{folder}/meters" }}

[reward]
kind = "tests.harness.tiny.reward:TinyReward"

[learner]
backend = "tests.chaos.clocked_backend:ClockedBackend"
device = "cpu"
threads = 1
groups_per_batch = 8
micro_batch_tokens = 512
learning_rate = 1e-3
options = {{ step_seconds = 0.1, clock = "{folder}/meters" }}
"""

LONG: Final = """
[rollout]
workers = 3
group_size = 4
max_new_tokens = 400
ignore_eos = true
max_running = 16
max_attempts = 10  # workers killed here did not die of their prompts
reissue_seconds = 2

[engine]
kind = "tests.chaos.metered_model:MeteredModel"
device = "cpu"
options = {{ threads = 1, step_seconds = 0.025, meter = "{folder}/meters" }}

[reward]
kind = "asyncrl.data.demo_task:reward"

[learner]
backend = "reference"
device = "cpu"
threads = 1
groups_per_batch = 4
micro_batch_tokens = 8192
learning_rate = 1e-4
"""


RANKS: Final = """
[rollout]
workers = 1
group_size = 4
max_new_tokens = 16
ignore_eos = true

[engine]
kind = "tests.chaos.metered_model:MeteredModel"
device = "cpu"
options = {{ threads = 1, meter = "{folder}/meters" }}

[reward]
kind = "asyncrl.data.demo_task:reward"

[learner]
backend = "megatron"
device = "cpu"
threads = 1
ranks = 4
machines = 2
pipeline_parallel = 2
expert_parallel = 2
groups_per_batch = 4
micro_batch_tokens = 128
learning_rate = 1e-4
"""


SMALL_DISKS: Final = (f"bus.max_log_bytes={8 * 2**20}", f"bus.max_message_bytes={2**20}")
"""Overrides for a run whose server has a disk of DISK_MEGABYTES."""
DISK_MEGABYTES: Final = 64
CALM: Final = "learner.options.step_seconds=0.3"
"""Override for a test that mostly waits, with short answers: three steps per second leave the cores to others."""


def evaluating(folder: Path, place: str) -> list[str]:
    """Overrides that make a storm's run evaluate its own prompts continuously. place: shared or dedicated"""
    return [
        "evaluation.every_steps=5",
        f"evaluation.place={place}",
        "evaluation.timeout_seconds=120",
        f'evaluation.datasets=[{{name = "prompts", path = "{folder}/prompts.jsonl", samples = 2, limit = 24}}]',
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """write     writes the model and the prompts to a folder, from a seed
    modules   modules that the run's processes import"""

    run_file: str
    write: Callable[[Path, int], None]
    modules: tuple[str, ...]


def _short(folder: Path, seed: int) -> None:
    tiny_files.write(folder, Policy.new(torch.Generator().manual_seed(seed)))


def _long(folder: Path, seed: int) -> None:
    demo_task.write(folder, seed=seed)
    make_tiny_model(folder / "model", seed=seed, characters=demo_task.DIGITS, max_positions=512)


def _ranks(folder: Path, seed: int) -> None:
    demo_task.write(folder, seed=seed)
    make_tiny_model(folder / "model", seed=seed, characters=demo_task.DIGITS, architecture="qwen3_moe")


ANSWERS: Final[Mapping[str, Answers]] = {
    "short": Answers(
        run_file=COMMON + SHORT,
        write=_short,
        modules=("tests.chaos.metered_net", "tests.harness.tiny.reward", "tests.chaos.clocked_backend"),
    ),
    "long": Answers(
        run_file=COMMON + LONG,
        write=_long,
        modules=("tests.chaos.metered_model", "asyncrl.data.demo_task", "asyncrl.backends.reference"),
    ),
    "ranks": Answers(
        run_file=COMMON + RANKS,
        write=_ranks,
        modules=(
            *("tests.chaos.metered_model", "asyncrl.data.demo_task", "asyncrl.backends.megatron.backend"),
            *("asyncrl.backends.megatron.rank", "transformers.models.qwen3_moe.modeling_qwen3_moe"),
        ),
    ),
}
