"""AReaL's own trainer, in its own environment: python3 areal_run.py JOB.json --config FILE [KEY=VALUE ...]

Writes to the folder PEER_OUT, until somebody ends it: steps.jsonl (its statistics of each step, with a time), and
what trained.py counts. The log of the SGLang server that it starts is there too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu.peers.trained import OUT_VARIABLE

_START_SECONDS: Final = 400.0
UNKNOWN: Final = ("enable_ep_moe", "enable_nan_detection")
"""Options of SGLang 0.5.10, which this one has not; all of them off."""


def say(*words: object) -> None:
    print(time.strftime("%H:%M:%S"), "peer:", *words, flush=True)


class Server:
    """A stock SGLang server on a GPU behind the learner's, with the options that AReaL would give it."""

    def __init__(self, config: Any, job: Mapping[str, Any], *, number: int, out: Path) -> None:
        from areal.api.cli_args import SGLangConfig, get_py_cmd

        options = SGLangConfig.build_args(sglang_config=config.sglang, tp_size=1, pp_size=1, base_gpu_id=0)
        options = {name: value for name, value in options.items() if name not in UNKNOWN}
        self.port = int(job["ports"][number])
        command = get_py_cmd(job["server"], options | job["server_options"] | {"host": "127.0.0.1", "port": self.port})
        command[0] = sys.executable
        gpu = job["learners"] + number
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpu + 1)))
        environment = {
            **os.environ,
            "PYTHONPATH": job["server_path"],  # without AReaL's packages and stand-ins
            "CUDA_VISIBLE_DEVICES": visible.split(",")[gpu],
            "NCCL_CUMEM_ENABLE": "0",
            "NCCL_NVLS_ENABLE": "0",
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",  # /health would hang while generation is paused
        }
        say("server:", *command)
        with (out / f"sglang{number or ''}.log").open("w") as log:
            self._process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def wait(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise SystemExit(f"the SGLang server ended with {self._process.returncode}")
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2).close()
            except OSError:
                time.sleep(0.5)
            else:
                return
        raise SystemExit("the SGLang server does not answer")


class Prompts:
    """What its dataloader asks of a dataset."""

    def __init__(self, path: Path, tokenizer: Any) -> None:
        prompts = [json.loads(line)["prompt"] for line in path.read_text().splitlines()]
        self._rows = [
            {"group": group, "input_ids": tokenizer(prompt, add_special_tokens=True)["input_ids"]}
            for group, prompt in enumerate(prompts)
        ]
        say(len(self), "prompts, the first of", len(self._rows[0]["input_ids"]), "tokens")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._rows[index]


def main() -> None:
    from areal import PPOTrainer
    from areal.api.cli_args import GRPOConfig, load_expr_config
    from areal.api.io_struct import LocalInfServerInfo
    from areal.engine import RemoteSGLangEngine
    from areal.utils.hf_utils import load_hf_tokenizer
    from areal.utils.stats_logger import StatsLogger

    out = Path(os.environ[OUT_VARIABLE])
    job = json.loads(Path(sys.argv[1]).read_text())
    config, _ = load_expr_config(sys.argv[2:], GRPOConfig)
    servers = [Server(config, job, number=number, out=out) for number in range(len(job["ports"]))]

    class Trainer(PPOTrainer):  # type: ignore[misc]
        def _init_rollout(self, rollout_config: Any, is_eval: bool = False, lora_path: str | None = None) -> Any:
            if is_eval:
                return None
            say("its learner is up; waiting for servers:", len(servers))
            for server in servers:
                server.wait()
            say("the servers are up")
            controller = RemoteSGLangEngine.as_controller(rollout_config, self.scheduler)
            infos = [LocalInfServerInfo(host="127.0.0.1", port=server.port, process=None) for server in servers]
            controller.initialize(role="rollout", server_args={}, server_infos=infos)
            say("its rollout worker is up")
            return controller

    def commit(self: Any, epoch: int, step: int, global_step: int, data: Any) -> None:
        merged: dict[str, Any] = {}
        for part in data if isinstance(data, list) else [data]:
            merged |= part
        row = {"time": time.time(), "step": global_step, **{name: float(value) for name, value in merged.items()}}
        with (out / "steps.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        seconds = {name.removeprefix("timeperf/"): round(row[name], 2) for name in row if name.startswith("timeperf/")}
        say("step", global_step, seconds)

    StatsLogger.commit = commit
    prompts = Prompts(Path(job["prompts"]), load_hf_tokenizer(config.tokenizer_path))
    trainer = Trainer(config, train_dataset=prompts, valid_dataset=None)
    say("training")
    workflow = "benchmarks.gpu.peers.areal_workflow.DrawnLengths"
    trainer.train(workflow=workflow, workflow_kwargs=job["lengths"])


if __name__ == "__main__":
    main()
