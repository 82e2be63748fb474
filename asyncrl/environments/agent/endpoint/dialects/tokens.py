"""Tokens in, tokens out, as in vLLM: POST /inference/v1/generate. For harnesses that render prompts themselves.

Tokens in logprobs are named "token_id:N", as verifiers' train client expects.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from asyncrl.environments.agent.endpoint.dialects.dialect import DONE, Dialect, is_cut, model_name, usage
from asyncrl.environments.agent.endpoint.request import (
    MOST_ANSWERS,
    Json,
    ModelRequest,
    Refused,
    find_overridden,
    rows,
    table,
    whole,
)
from asyncrl.environments.agent.endpoint.session import Session
from asyncrl.environments.agent.endpoint.turns import Turn


class TokenIds(Dialect):
    paths = ("/inference/v1/generate",)
    end = DONE

    def read(self, body: Json, session: Session) -> ModelRequest:
        ids = rows(body.get("token_ids"), "token_ids")
        if not ids:
            raise Refused("token_ids is empty")
        highest = session.chat_format.num_tokens - 1
        for place, one in enumerate(ids):
            if type(one) is not int or not 0 <= one <= highest:
                whole(one, f"token_ids[{place}]", low=0, high=highest)
                raise Refused(f"token_ids[{place}] must be a token id, got {one!r}")
        params = table(body.get("sampling_params") or {}, "sampling_params")
        if body.get("stream"):
            raise Refused("stream is not served here")
        return ModelRequest(
            tokens=np.array(ids, np.int32),
            max_tokens=whole(params.get("max_tokens"), "sampling_params.max_tokens", low=1),
            count=whole(params.get("n"), "sampling_params.n", low=1, high=MOST_ANSWERS) or 1,
            model=model_name(body),
            overridden=find_overridden(params, stop=session.stop),
        )

    def write(self, request: ModelRequest, replies: Sequence[Turn], session: Session) -> Json:
        return {
            "request_id": replies[0].tag,
            "model": request.model,
            "prompt_token_ids": replies[0].context.tolist(),
            "choices": [_choice(index, turn) for index, turn in enumerate(replies)],
            "usage": usage(replies),
        }


def _choice(index: int, turn: Turn) -> Json:
    pairs = zip(turn.answer.tokens.tolist(), turn.answer.logprobs.tolist(), strict=True)
    content = [{"token": f"token_id:{token}", "logprob": logprob, "top_logprobs": []} for token, logprob in pairs]
    return {
        "index": index,
        "token_ids": turn.answer.tokens.tolist(),
        "logprobs": {"content": content},
        "finish_reason": "length" if is_cut(turn) else "stop",
    }
