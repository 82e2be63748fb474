"""Ports: the interfaces that actors depend on. All adapters of a port pass the same contract tests.

bus           Bus            tests/contracts/test_bus.py           memory, JetStream
              ObjectStore    tests/contracts/test_object_store.py  memory, JetStream
engine        Engine         tests/contracts/test_engine.py        in-process, SGLang
backend       Backend        tests/contracts/test_backend.py       reference, Megatron-Core
weights       WeightChannel  tests/contracts/test_weights.py       files, objects (and NCCL: tests/unit/weights)
launcher      Launcher       tests/contracts/test_launcher.py      local, Ray; not used by actors
functions     Reward, RolloutFn, ...: user-supplied functions
generation    Generation, PartialGeneration: what an engine returns and resumes
rejections    counts rejected messages and logs the first of each kind and sender
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.protocols.backend import Backend, Offloads, Rehearsing, SavesBeside, StepResult
from asyncrl.protocols.bus import (
    Asked,
    Bus,
    Deliveries,
    Delivery,
    LogMark,
    LogState,
    Loss,
    ObjectInfo,
    ObjectStore,
    Record,
)
from asyncrl.protocols.engine import Collectives, Engine, EngineStats, Intake, LoadReport, SharesGpus, Source
from asyncrl.protocols.functions import Generate, Reward, RewardFn, RolloutFn, Sample, Tokenizer
from asyncrl.protocols.generation import Generation, PartialGeneration
from asyncrl.protocols.weights import Receiver, Sender, Transfer, WeightChannel

if TYPE_CHECKING:
    from asyncrl.tensors.snapshot import Snapshot as Snapshot  # returned by Backend.export; importing it imports torch

__all__ = [
    "Asked",
    "Backend",
    "Bus",
    "Collectives",
    "Deliveries",
    "Delivery",
    "Engine",
    "EngineStats",
    "Generate",
    "Generation",
    "Intake",
    "LoadReport",
    "LogMark",
    "LogState",
    "Loss",
    "ObjectInfo",
    "ObjectStore",
    "PartialGeneration",
    "Receiver",
    "Record",
    "Offloads",
    "Rehearsing",
    "Reward",
    "RewardFn",
    "RolloutFn",
    "Sample",
    "SavesBeside",
    "SharesGpus",
    "Sender",
    "Source",
    "StepResult",
    "Tokenizer",
    "Transfer",
    "WeightChannel",
]
