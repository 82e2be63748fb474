"""What a run on the task of staleness_task.py needs on disk: a model folder and the prompts.

Digits are text outside and tokens inside: prompt "35", answer "302571". No Hugging Face model is in the folder; its
config.json has what asyncrl itself looks for.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import safetensors.torch

from asyncrl.data.tiny_model import SPECIAL_TOKENS, make_tokenizer
from benchmarks import staleness_task
from benchmarks.staleness_task import SIZE, Policy

FIRST_DIGIT: Final = len(SPECIAL_TOKENS)
"""The token of digit 0."""
WEIGHTS_FILE: Final = "model.safetensors"


def write(folder: Path, policy: Policy) -> None:
    """The model to ``folder``/model, all prompts with the right answers to ``folder``/prompts.jsonl."""
    make_tokenizer("".join(map(str, range(SIZE)))).save_pretrained(folder / "model")
    looks = {"architectures": ["LlamaForCausalLM"], "vocab_size": FIRST_DIGIT + SIZE}
    (folder / "model" / "config.json").write_text(json.dumps(looks))
    safetensors.torch.save_file(policy.named_parameters, folder / "model" / WEIGHTS_FILE)
    prompts = staleness_task.all_prompts()
    rows = zip(prompts.tolist(), staleness_task.right_answers(prompts).tolist(), strict=True)
    lines = (json.dumps({"prompt": _text(prompt), "label": _text(answer)}) + "\n" for prompt, answer in rows)
    (folder / "prompts.jsonl").write_text("".join(lines))


def _text(digits: Sequence[int]) -> str:
    return "".join(map(str, digits))
