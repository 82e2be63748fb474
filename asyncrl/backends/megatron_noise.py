"""What Megatron and torch say together that nobody can act on: silenced by its words, and nothing else is."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_WARNINGS: tuple[tuple[str, type[Warning]], ...] = (
    # They are not, on purpose: torch's own are what runs.
    (r"Transformer Engine and Apex are not installed|Apex is not installed", UserWarning),
    (r"absl.logging is not installed", UserWarning),
    # Defaults of Megatron's own that it complains about.
    (r"full scope is deprecated", UserWarning),
    (r"MimoModelConfig is experimental", UserWarning),
    # Tensor parallelism works without; the order it would fix is that of one all-reduce and one matrix product.
    (r"When using async grad allreduce it is recommended", UserWarning),
    # optimizer.py looks whether the distributed optimizer's views have a gradient; they have main_grad.
    (r"The \.grad attribute of a Tensor that is not a leaf Tensor", UserWarning),
    # torch 2.13 renamed what distributed/param_and_grad_buffer.py calls.
    (r"`torch\.distributed\.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated", FutureWarning),
    (r".*", DeprecationWarning),
)

_LOG_LINES = {
    "megatron.core.models.gpt.gpt_model": "GPTModel IS DEPRECATED",
    "megatron.core.distributed.distributed_data_parallel": "full_param_layout not provided",
    # With the CPU's generator in the place of the GPU's the two are one, and it notices.
    "megatron.core.tensor_parallel.random": "CPU RNG state changed within GPU RNG context",
}


@contextmanager
def quiet() -> Iterator[None]:
    """Around any call into Megatron; also a decorator."""
    with warnings.catch_warnings():
        for message, category in _WARNINGS:
            warnings.filterwarnings("ignore", message=message, category=category)
        yield


def quiet_logs() -> None:
    """Once per process."""
    for name, start in _LOG_LINES.items():
        logging.getLogger(name).addFilter(_Without(start))


class _Without(logging.Filter):
    """Drops the records whose message begins so."""

    def __init__(self, start: str) -> None:
        super().__init__()
        self._start = start

    def filter(self, record: logging.LogRecord) -> bool:
        return self._start not in record.getMessage()
