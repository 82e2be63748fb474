"""The process of an engine's own SGLang server."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from asyncrl.config.learner import LoraSection
from asyncrl.engines.sglang.adapters import server_arguments
from asyncrl.engines.sglang.arguments import check_arguments
from asyncrl.engines.sglang.options import Options
from asyncrl.engines.sglang.served_model import ServedModel
from asyncrl.engines.sglang.server import (
    ServerProcess,
    check_dtype,
    check_installed,
    free_port,
    server_command,
    server_environment,
)

log = logging.getLogger(__name__)


def server_of(
    model: ServedModel,
    *,
    device: str,
    dtype: str,
    stamp: str,
    lora: LoraSection | None,
    options: Options,
    log_path: Path,
    tells_experts: bool,
) -> tuple[ServerProcess, str]:
    """Return the process, which is not started, and its URL, where it responds half a minute after the start, or later.

    Another server may take the port before. So the caller must check ``stamp``, which is unique: the server reports it
    as the version of its weights. The other arguments are those of SGLangEngine. Raises ConfigError.
    """
    check_installed()
    given = dict(options.server_arguments)
    check_arguments(given)
    check_dtype(dtype, device=device, server_arguments=given)
    port = free_port()
    command = server_command(
        model.path,
        device=device,
        dtype=dtype,
        port=port,
        weight_version=stamp,
        tensor_parallel=options.tensor_parallel,
        quantization=model.quantization,
        stream_interval=options.stream_interval,
        server_arguments=server_arguments(lora, model.shapes, device=device) | given,
        tells_experts=tells_experts,
    )
    log.info("starting SGLang, output in %s: %s", log_path, " ".join(command))
    environment = server_environment(os.environ, device=device, options=options)
    return ServerProcess(command, environment=environment, log_path=log_path), f"http://127.0.0.1:{port}"
