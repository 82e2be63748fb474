"""What actors ask of the world. Each protocol is a port; its adapters pass one contract test file.

bus.py        Bus            tests/test_bus_contract*.py     memory, JetStream
              ObjectStore    tests/test_objects.py           memory, JetStream
engine.py     Engine         tests/test_engine_contract.py   in-process Hugging Face model, SGLang
backend.py    Backend        tests/test_backend_contract.py  reference PyTorch, Megatron-Core
weights.py    WeightChannel  tests/test_weights_contract.py  files, objects (NCCL sends besides: tests/test_nccl.py)
functions.py  what users bring: rewards, rollouts
Launcher is in launchers/port.py (tests/test_launcher_contract.py: local, Ray): actors do not know it.
"""

from __future__ import annotations

from asyncrl.generation import Generation, Partial
from asyncrl.protocols.backend import Backend, StepResult
from asyncrl.protocols.bus import Asked, Bus, Deliveries, Delivery, ObjectInfo, ObjectStore, Record
from asyncrl.protocols.engine import Engine, EngineStats, LoadReport, Receiver
from asyncrl.protocols.functions import Generate, Reward, RewardFn, RolloutFn, Sample, Tokenizer
from asyncrl.protocols.weights import Sender, Transfer, WeightChannel

__all__ = [
    "Asked",
    "Backend",
    "Bus",
    "Deliveries",
    "Delivery",
    "Engine",
    "EngineStats",
    "Generate",
    "Generation",
    "LoadReport",
    "ObjectInfo",
    "ObjectStore",
    "Partial",
    "Receiver",
    "Record",
    "Reward",
    "RewardFn",
    "RolloutFn",
    "Sample",
    "Sender",
    "StepResult",
    "Tokenizer",
    "Transfer",
    "WeightChannel",
]
