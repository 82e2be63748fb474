"""Samples rollouts of one or several turns from given weights, in batches, with the logprob of every sampled token."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.old_tokens.decoder import Decoder

Reply = Callable[[Sequence[str]], str]
"""What the environment says after the turns so far; "" ends the rollout."""

_MOST_ROWS: Final = 1024


@dataclass(slots=True, kw_only=True)
class Sampled:
    """A rollout, without its prompt.

    tokens     sampled by the policy, or said by the environment
    is_policy  which of them the policy sampled
    logprobs, entropies  of the policy that sampled, at temperature 1; 0 for tokens of the environment
    said       what the model said in each turn, without the end token
    """

    tokens: list[int] = field(default_factory=list)
    is_policy: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    is_cut: bool = False


class Sampler:
    """A copy of the model whose weights are those of any version."""

    def __init__(self, model: Path, *, tokenizer: Any, device: str, dtype: torch.dtype, graphs: bool) -> None:
        self._tokenizer = tokenizer
        self._device = torch.device(device)
        self._end: int = tokenizer.eos_token_id
        self._decoder = Decoder(model, device=self._device, dtype=dtype, graphs=graphs)

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._decoder.load(weights)

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        replies: Sequence[Reply],
        turn_tokens: int,
        generator: torch.Generator,
    ) -> list[Sampled]:
        """Return one rollout for each prompt. Equal generators draw equal numbers, whatever the weights."""
        made: list[Sampled] = []
        for begin in range(0, len(prompts), _MOST_ROWS):
            part = slice(begin, begin + _MOST_ROWS)
            made += self._sample(prompts[part], replies[part], turn_tokens=turn_tokens, generator=generator)
        return made

    def _sample(
        self,
        prompts: Sequence[Sequence[int]],
        replies: Sequence[Reply],
        *,
        turn_tokens: int,
        generator: torch.Generator,
    ) -> list[Sampled]:
        rollouts = [Sampled() for _ in prompts]
        active = set(range(len(prompts)))
        while active:  # a batch has all rows in every turn: the decoder keeps a graph for each number of rows
            contexts = [[*prompt, *one.tokens] for prompt, one in zip(prompts, rollouts, strict=True)]
            turns = self._turn(contexts, turn_tokens=turn_tokens, generator=generator, active=active)
            still = set()
            for i in sorted(active):
                rollout, turn = rollouts[i], turns[i]
                rollout.tokens += turn.tokens
                rollout.is_policy += [True] * len(turn.tokens)
                rollout.logprobs += turn.logprobs
                rollout.entropies += turn.entropies
                rollout.is_cut = turn.tokens[-1] != self._end
                ends = len(turn.tokens) - (not rollout.is_cut)
                rollout.said.append(self._tokenizer.decode(turn.tokens[:ends], skip_special_tokens=False))
                if reply := replies[i](rollout.said):
                    told = self._tokenizer(reply, add_special_tokens=False)["input_ids"]
                    rollout.tokens += told
                    rollout.is_policy += [False] * len(told)
                    rollout.logprobs += [0.0] * len(told)
                    rollout.entropies += [0.0] * len(told)
                    still.add(i)
            active = still
        return rollouts

    def _turn(
        self,
        contexts: Sequence[Sequence[int]],
        *,
        turn_tokens: int,
        generator: torch.Generator,
        active: Collection[int],
    ) -> list[Sampled]:
        """Continue each active context until the end token, or for ``turn_tokens``."""
        batch = self._decoder.start(contexts, most=turn_tokens)
        columns = []
        ended = torch.tensor([i not in active for i in range(len(contexts))], device=self._device)
        for _ in range(turn_tokens):
            batch.sample(generator)
            columns.append((batch.tokens.clone(), batch.logprobs.clone(), batch.entropies.clone(), ~ended))
            ended |= batch.tokens == self._end
            if bool(ended.all()):
                break
        stacked = [torch.stack(column, 1).tolist() for column in zip(*columns, strict=True)]
        rows = zip(*stacked, strict=True)
        return [
            Sampled(
                tokens=[t for t, there in zip(row, is_there, strict=True) if there],
                logprobs=[p for p, there in zip(logprobs, is_there, strict=True) if there],
                entropies=[e for e, there in zip(entropies, is_there, strict=True) if there],
            )
            for row, logprobs, entropies, is_there in rows
        ]
