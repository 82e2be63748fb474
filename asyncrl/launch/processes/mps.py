"""NVIDIA MPS for a GPU that learner and engines share: their kernels run side by side instead of in time slices.

The daemon is ours, with private folders, and ends with us. No setting of the GPU is changed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from asyncrl.config.learner import LearnerSection
from asyncrl.errors import ConfigError
from asyncrl.os_process import asks_for_signal_on_parent_death

_START_SECONDS: Final = 10.0
_DAEMON: Final = "nvidia-cuda-mps-control"


def environment_of_learner(learner: LearnerSection) -> Mapping[str, str]:
    percent = learner.shared_gpu_percent
    return {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(percent)} if percent else {}


@contextlib.contextmanager
def daemon() -> Iterator[Mapping[str, str]]:
    """Yield the environment of processes that share GPUs. Raises ConfigError if the daemon does not start."""
    with tempfile.TemporaryDirectory(prefix="asyncrl-mps-", ignore_cleanup_errors=True) as folder:
        pipe = Path(folder) / "pipe"
        environment = {"CUDA_MPS_PIPE_DIRECTORY": str(pipe), "CUDA_MPS_LOG_DIRECTORY": str(Path(folder) / "log")}
        for directory in environment.values():
            Path(directory).mkdir()
        try:
            process = subprocess.Popen(
                [_DAEMON, "-f"],
                env=os.environ | environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                preexec_fn=asks_for_signal_on_parent_death(signal.SIGTERM),
            )
        except OSError as error:
            raise ConfigError(
                f"learner.shared_gpu_percent: cannot start {_DAEMON}: {error.strerror}; set it to 0 for time slices"
            ) from None
        try:
            deadline = time.monotonic() + _START_SECONDS
            while not (pipe / "control").exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise ConfigError(
                        f"learner.shared_gpu_percent: {_DAEMON} does not start; set it to 0 for time slices"
                    )
                time.sleep(0.05)
            yield environment
        finally:
            process.terminate()
            process.wait()
