"""How many tokens a prompt and its answer may have together in an SGLang server: fewer than the model's context.

SGLang 0.5.23 (managers/tp_worker.py, managers/scheduler.py, mem_cache/allocator/base.py) refuses a prompt that leaves
six tokens or fewer of the context, and silently shortens an answer that would leave fewer than two. The KV pool limits
a request in the same way if it is smaller than the context; besides, up to two of its pages stay empty.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

from asyncrl.engines.sglang.arguments import option_name
from asyncrl.engines.sglang.options import Options
from asyncrl.engines.sglang.server import CPU_ARGUMENTS

log = logging.getLogger(__name__)

_UNUSED: Final = 6
"""A request that leaves this many tokens is neither refused nor shortened, whatever the length of its prompt."""


def before_start(options: Options, *, device: str, of_model: int) -> int:
    """Return the limit as far as the options tell. The size of a GPU's KV pool is known only after the start.

    device    engine.device
    of_model  context length of the model, in tokens
    """
    if options.url:
        return of_model - _UNUSED
    given = dict(CPU_ARGUMENTS) if device == "cpu" else {}
    given |= {option_name(key): value for key, value in options.server_arguments.items()}
    context, pool, page = (_number(given.get(name)) for name in ("context-length", "max-total-tokens", "page-size"))
    longest = min(filter(None, (of_model, context, pool))) - _UNUSED
    return _limit({"max_req_input_len": longest, "max_total_num_tokens": pool, "page_size": page}, of_model=of_model)


def of_server(info: Mapping[str, Any], options: Options, *, url: str, device: str, of_model: int) -> int:
    """Return the limit from the /server_info of the server at ``url``. Warns if the options did not tell."""
    limit, expected = _limit(info, of_model=of_model), before_start(options, device=device, of_model=of_model)
    if limit < expected:
        log.warning(
            "SGLang at %s takes up to %d tokens of prompt and answer together, not the %d that the run counts on, so "
            "longer requests will fail; give it more memory or a larger --context-length, or use shorter prompts",
            url,
            limit,
            expected,
        )
    return limit


def _limit(info: Mapping[str, Any], *, of_model: int) -> int:
    of_pool = int(info.get("max_total_num_tokens") or 2**31) - 2 * int(info.get("page_size") or 1)
    return min(of_model, int(info.get("max_req_input_len") or of_model - _UNUSED), of_pool)


def _number(value: object) -> int:
    """Return the value of an option; 0 if it is not set, or not a number, which the server refuses."""
    return int(text) if (text := str(value)).isdecimal() else 0
