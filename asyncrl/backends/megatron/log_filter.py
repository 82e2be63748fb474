"""Silences warnings of Megatron and torch that users cannot act on, matched by their text."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_WARNINGS: tuple[tuple[str, type[Warning]], ...] = (
    # Intended: we use torch's own kernels.
    (r"Transformer Engine and Apex are not installed|Apex is not installed", UserWarning),
    (r"absl.logging is not installed", UserWarning),
    # Megatron warns about its own defaults.
    (r"full scope is deprecated", UserWarning),
    (r"MimoModelConfig is experimental", UserWarning),
    # The user trains experts alone, and optimizer.py leaves this optimizer out.
    (r"WARNING: there is no optimizer on RANK", UserWarning),
    # The setting would only order one all-reduce and one matrix product. Tensor parallelism works without it.
    (r"When using async grad allreduce it is recommended", UserWarning),
    # optimizer.py reads .grad of the distributed optimizer's views, which have main_grad instead.
    (r"The \.grad attribute of a Tensor that is not a leaf Tensor", UserWarning),
    # torch 2.13 renamed functions that distributed/param_and_grad_buffer.py calls.
    (r"`torch\.distributed\.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated", FutureWarning),
    # tensor_parallel/layers.py recommends it for speed, but NCCL weight transfers would wait for the learner's kernels.
    (r".*recommended to set the environment variable CUDA_DEVICE_MAX_CONNECTIONS", UserWarning),
    (r".*", DeprecationWarning),
)

_LOG_LINES = {
    "megatron.core.models.gpt.gpt_model": "GPTModel IS DEPRECATED",
    "megatron.core.distributed.distributed_data_parallel": "full_param_layout not provided",
    # With cpu_shim the CPU and GPU generators are the same, and Megatron warns about it.
    "megatron.core.tensor_parallel.random": "CPU RNG state changed within GPU RNG context",
}


@contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings around any call into Megatron. Also a decorator."""
    with warnings.catch_warnings():
        for message, category in _WARNINGS:
            warnings.filterwarnings("ignore", message=message, category=category)
        yield


def quiet_logs() -> None:
    """Silence the loggers. Call once per process."""
    for name, start in _LOG_LINES.items():
        logging.getLogger(name).addFilter(_Without(start))


class _Without(logging.Filter):
    """Drops records whose message contains ``start``."""

    def __init__(self, start: str) -> None:
        super().__init__()
        self._start = start

    def filter(self, record: logging.LogRecord) -> bool:
        return self._start not in record.getMessage()
