"""TRL's GRPOTrainer on the CPU, as benchmarks/laptop.py compares it. Runs in a Python with trl, and without asyncrl.

python benchmarks/laptop_trl.py MODEL DATA STEPS FOLDER
"""

from __future__ import annotations

import json
import re
import sys
import time
from typing import Any

WARMUP = 1


def reward(completions: list[str], label: list[str], **_: Any) -> list[float]:
    found = [re.match(r"\s*(\d+)", text) for text in completions]
    return [float(match is not None and match[1] == wanted) for match, wanted in zip(found, label, strict=True)]


def main() -> None:
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    ends: list[float] = []
    used: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.monotonic())
            used.append(time.process_time())

    model, data, steps, folder = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
    with open(data) as file:
        rows = [json.loads(line) for line in file]
    prompts = Dataset.from_list([{"prompt": row["prompt"], "label": str(row["label"])} for row in rows])
    config = GRPOConfig(
        output_dir=folder,
        max_steps=WARMUP + steps,
        per_device_train_batch_size=32,  # 4 prompts x 8 samples
        num_generations=8,
        max_completion_length=12,
        generation_kwargs={"min_new_tokens": 12},
        learning_rate=2e-5,
        adam_beta2=0.999,
        lr_scheduler_type="constant",
        beta=0.0,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": torch.float32},
        loss_type="dapo",  # mean over the batch's tokens
    )
    tokenizer = AutoTokenizer.from_pretrained(model)
    GRPOTrainer(
        model=model,
        args=config,
        train_dataset=prompts,
        reward_funcs=reward,
        processing_class=tokenizer,
        callbacks=[Clock()],
    ).train()
    first = WARMUP - 1
    cost = {"step_seconds": (ends[-1] - ends[first]) / steps, "cpu_seconds": (used[-1] - used[first]) / steps}
    print(json.dumps(cost))


if __name__ == "__main__":
    main()
