"""TRL's AsyncGRPOTrainer on an SGLang server: python -m benchmarks.gpu.peers.trl_run JOB.json

TRL's loop needs vLLM for three things, and has places for others: its rollout loop asks SGLang here (one request of
the length drawn), weights go as CUDA handles of one flattened bucket, and the GPU-hub's FlashAttention-3 for trees is
the FlashAttention that is part of torch. Its trainer, queue, bound, loss and optimizer are its own.

PEER_OUT/steps.jsonl gets a line for each optimizer step: {time, step, tokens, counts, dropped, train_seconds}. Of what
was taken from the queue, counts[i] tokens were i versions old by TRL's own count, which is that of the weights when the
group was begun; dropped tokens were past its bound.
"""

from __future__ import annotations

import contextvars
import json
import os
import sys
import time
import urllib.request
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F

from asyncrl.backends.kernels import flash
from benchmarks.gpu.lengths import Lengths
from benchmarks.gpu.peers.trained import OUT_VARIABLE

try:
    from transformers import TrainerCallback
    from trl.experimental.async_grpo import async_rollout_worker
except ImportError:  # anywhere but in TRL's own processes
    TrainerCallback = object
    async_rollout_worker = SimpleNamespace(_AsyncRolloutLoop=object, AsyncRolloutWorker=object)

_GROUP: Final[contextvars.ContextVar[tuple[int, int]]] = contextvars.ContextVar("group")
_CHARACTERS: Final = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""A chat template that adds nothing: prompts are text, and TRL renders messages."""
_TEXT: Final = {
    "type": "object",
    "properties": {"role": {"const": "assistant"}, "content": {"type": "string"}},
    "x-regex": r"^(?P<content>[\s\S]*)$",
}
"""How it reads an answer back."""


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A number that depends on the answer's first tokens, as benchmarks.gpu.lengths:noise."""
    return [zlib.crc32(np.array(ids[:16], np.int32).tobytes()) / 2**32 for ids in completion_ids]


class Loop(async_rollout_worker._AsyncRolloutLoop):  # type: ignore[misc]
    """TRL's rollout loop with another request."""

    def __init__(self, *, lengths: Mapping[str, Any], **options: Any) -> None:
        super().__init__(**options)
        self._lengths = Lengths(**lengths)
        self._begun: Counter[int] = Counter()

    async def _generate_one(self, prompt: Any, tool_dict: Any, tools: Any, group_id: int = 0) -> Any:
        _GROUP.set((group_id, self._begun[group_id]))
        self._begun[group_id] += 1
        return await super()._generate_one(prompt, tool_dict, tools, group_id)

    async def _generate_one_turn(self, prompt_ids: list[int]) -> tuple[list[int], list[float]]:
        group, index = _GROUP.get()
        length = self._lengths.of(group_id=group, index=index)
        sampling = {"max_new_tokens": length, "ignore_eos": True, "temperature": self.temperature}
        body = {"input_ids": list(prompt_ids), "sampling_params": sampling, "return_logprob": True}
        answer = await self._post("/generate", body, self.request_timeout)
        found = answer["meta_info"]["output_token_logprobs"]
        return [one[1] for one in found], [one[0] for one in found]


class Worker(async_rollout_worker.AsyncRolloutWorker):  # type: ignore[misc]
    _loop_cls = Loop


class Counting:
    """The trainer's end of the queue, which counts what is taken by age, and what TRL then drops."""

    def __init__(self, queue: Any, worker: Worker, *, bound: int) -> None:
        self._queue, self._worker, self._bound = queue, worker, bound
        self.counts: Counter[int] = Counter()
        self.dropped = 0

    def get(self, timeout: float | None = None) -> Any:
        sample = self._queue.get(timeout=timeout)
        age = self._worker.model_version - sample.model_version
        tokens = int(sample.completion_mask.sum())
        if age > self._bound:
            self.dropped += tokens
        else:
            self.counts[age] += tokens
        return sample

    def qsize(self) -> int:
        return int(self._queue.qsize())


class Weights:
    """Sends weights to an SGLang server that can open handles of this process's memory."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._version = 0
        self._sent: Any = None

    def init_weight_transfer(self) -> None:
        from trl.experimental.async_grpo.vllm_client import VLLMClient

        VLLMClient(self._url).wait_for_server_ready(poll_interval_s=0.5)

    def pause(self) -> None:
        self._ask("/pause_generation", {"mode": "in_place"})

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        bucket = FlattenedTensorBucket(named_tensors=[(name, tensor.to(torch.bfloat16)) for name, tensor in iterator])
        data = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
        if data["flattened_tensor"].is_cuda:
            monkey_patch_torch_reductions()  # handles name the GPU, not its number in this process
            torch.cuda.synchronize()
        self._sent = data  # until the next one: the server may still copy when it has answered
        self._version += 1
        body = {
            "serialized_named_tensors": [MultiprocessingSerializer.serialize(data, output_str=True)],
            "load_format": "flattened_bucket",
            "flush_cache": False,
            "weight_version": str(self._version),
        }
        answer = self._ask("/update_weights_from_tensor", body)
        if not answer.get("success"):
            raise RuntimeError(f"the server refuses version {self._version}: {answer}")

    def resume(self) -> None:
        self._ask("/continue_generation", {})

    def destroy(self) -> None:
        pass

    def _ask(self, path: str, body: Mapping[str, Any]) -> Any:
        data = json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data=data, headers={"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as response:
            text = response.read()
        return json.loads(text) if text[:1] == b"{" else {}


class Steps(TrainerCallback):  # type: ignore[misc]
    def __init__(self, counting: Counting) -> None:
        self._counting = counting
        self.trainer: Any = None

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        taken, dropped = self._counting.counts, self._counting.dropped
        self._counting.counts, self._counting.dropped = Counter(), 0
        row = {
            "time": time.time(),
            "step": state.global_step,
            "tokens": int(self.trainer._step_trained_tokens),
            "counts": [taken[age] for age in range(max(taken, default=-1) + 1)],
            "dropped": dropped,
            "train_seconds": self.trainer._current_train_step_time,
        }
        with (Path(os.environ[OUT_VARIABLE]) / "steps.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_boundaries: torch.Tensor,
    key_boundaries: torch.Tensor,
    longest_query: int,
    longest_key: int,
    **_: Any,
) -> torch.Tensor:
    """As flash_attn_varlen_func, causal: query [n, heads, d], key and value [k, key-value heads, d]."""
    if query.is_cuda:
        runs = flash.Runs(
            query_boundaries=query_boundaries,
            key_boundaries=key_boundaries,
            longest_query=longest_query,
            longest_key=longest_key,
        )
        return flash.attention(query, key, value, runs)
    attended = []
    of_query, of_key = query_boundaries.tolist(), key_boundaries.tolist()
    for run in range(len(of_query) - 1):
        q = query[of_query[run] : of_query[run + 1]]
        k, v = (x[of_key[run] : of_key[run + 1]] for x in (key, value))
        sees = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        attended.append(F.scaled_dot_product_attention(q, k, v, attn_mask=sees, enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(attended)


def main() -> None:
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from transformers import AutoTokenizer
    from trl.experimental import async_grpo
    from trl.experimental.async_grpo import packing

    job = json.loads(Path(sys.argv[1]).read_text())
    if not torch.cuda.is_available():
        torch.cuda.get_device_name = lambda *_: "CPU"  # TRL asks for the GPU's without looking
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=attention)
    async_rollout_worker.is_vllm_available = lambda *_, **__: True
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    tokenizer.chat_template = _CHARACTERS
    tokenizer.response_schema = _TEXT
    prompts = [json.loads(line)["prompt"] for line in Path(job["prompts"]).read_text().splitlines()]
    table = InMemoryTable.from_pylist([{"prompt": [{"role": "user", "content": prompt}]} for prompt in prompts])
    rows = Dataset(table, fingerprint="prompts")  # its own would be a hash, for which dill must know this pyarrow
    config = async_grpo.AsyncGRPOConfig(
        output_dir=str(Path(os.environ[OUT_VARIABLE]) / "trl"),
        vllm_server_base_url=job["url"],
        max_steps=1000,
        save_strategy="no",
        report_to=[],
        **job["config"],
    )
    worker = Worker(
        model_name=job["model"],
        dataset=rows,
        reward_funcs=[reward],
        processing_class=tokenizer,
        eos_token_ids=[tokenizer.eos_token_id],
        num_generations=config.num_generations,
        max_inflight_tasks=config.max_inflight_tasks,
        queue_maxsize=config.queue_maxsize,
        vllm_server_url=job["url"],
        max_tokens=config.max_completion_length,
        temperature=config.temperature,
        request_timeout=config.request_timeout,
        lengths=job["lengths"],
    )
    queue = worker.rollout_buffer
    worker.rollout_buffer = counting = Counting(queue, worker, bound=config.max_staleness)
    steps = Steps(counting)
    trainer = async_grpo.AsyncGRPOTrainer(
        model=job["model"],
        args=config,
        train_dataset=rows,
        processing_class=tokenizer,
        callbacks=[steps],
        rollout_worker=worker,
        weight_transfer=Weights(job["url"]),
    )
    worker.rollout_buffer = queue  # the end that its process gets
    steps.trainer = trainer
    trainer.train()


if __name__ == "__main__":
    main()
