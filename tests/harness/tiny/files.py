"""The files of a run on the tiny task: a model folder and the prompts.

Digits are text outside and tokens inside: prompt "35", answer "302571". The folder holds no Hugging Face model; its
config.json has only the keys that asyncrl itself reads.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import safetensors.torch

from tests.harness.tiny import task
from tests.harness.tiny.task import SIZE, Policy

FIRST_DIGIT: Final = 4
"""The token of digit 0."""
WEIGHTS_FILE: Final = "model.safetensors"


def write(folder: Path, policy: Policy) -> None:
    """Write the model to ``folder``/model, and all prompts with their right answers to ``folder``/prompts.jsonl."""
    # This import loads transformers and takes a second; processes that only read these files do not need it.
    from asyncrl.data.tiny_model import SPECIAL_TOKENS, make_tokenizer

    assert len(SPECIAL_TOKENS) == FIRST_DIGIT
    make_tokenizer("".join(map(str, range(SIZE)))).save_pretrained(folder / "model")
    looks = {"architectures": ["LlamaForCausalLM"], "vocab_size": FIRST_DIGIT + SIZE}
    (folder / "model" / "config.json").write_text(json.dumps(looks))
    safetensors.torch.save_file(policy.named_parameters, folder / "model" / WEIGHTS_FILE)
    prompts = task.all_prompts()
    rows = zip(prompts.tolist(), task.right_answers(prompts).tolist(), strict=True)
    lines = (json.dumps({"prompt": _text(prompt), "label": _text(answer)}) + "\n" for prompt, answer in rows)
    (folder / "prompts.jsonl").write_text("".join(lines))


def _text(digits: Sequence[int]) -> str:
    return "".join(map(str, digits))
