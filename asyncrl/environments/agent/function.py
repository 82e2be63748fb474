"""The rollout function "agent": a harness runs an agent on the prompt, and the agent's sampled tokens are trained.

    [rollout]
    function = "agent"
    [rollout.options]
    harness = "command"
    [rollout.options.harness_options]
    command = ["python", "my_agent.py"]

The agent runs in a separate process and is given a URL, a key and a model name (endpoint/). If the agent fails, its
sample fails. An agent that never calls the model also fails, because there is nothing to train.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

import numpy as np

from asyncrl.config.checks import Positive, Range
from asyncrl.environments.agent.endpoint.chat_format import ChatFormat, TemplateFormat
from asyncrl.environments.agent.endpoint.images import as_data_urls
from asyncrl.environments.agent.endpoint.parsers import SGLangParser
from asyncrl.environments.agent.endpoint.renderer import check_renderer, load_renderer
from asyncrl.environments.agent.endpoint.server import EndpointServer
from asyncrl.environments.agent.endpoint.session import Session
from asyncrl.environments.agent.endpoint.turns import TrainedSequence, Turn, Turns
from asyncrl.environments.agent.harnesses.load import Limited, load_harness
from asyncrl.environments.agent.harnesses.protocol import Endpoint, Outcome, Task, outcome_of
from asyncrl.environments.port import Generate
from asyncrl.errors import ConfigError, RolloutError
from asyncrl.messages import PromptGroup, Trajectory, TurnReward, replace
from asyncrl.messages.control import ServerAddress

_log: Final = logging.getLogger("asyncrl.endpoint")


@dataclass(frozen=True, kw_only=True)
class Options:
    """[rollout.options] with rollout.function = "agent"."""

    harness: str
    """command, verifiers, outside, or your own "package.module:Harness"."""
    harness_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the harness."""
    timeout_seconds: Positive[float] = 600.0
    """Time limit of a sample, including the model's answers."""
    on_timeout: Literal["fail", "truncate"] = "fail"
    """What to do with a sample over the limit. fail: it has no reward and is left out of its group
    (rollout.min_group). truncate: train what was sampled, with finish_reason "length"."""
    timeout_reward: float | None = None
    """Reward of a truncated sample; not set: the run's reward function decides."""
    restart: Literal["again", "never"] = "again"
    """What to do with a group that a worker began and did not finish. again: run it again; where the harness repeats
    its requests, sampled tokens are reused. never: fail it, for harnesses that must not run twice, for example
    because they send mail."""
    thinking: Literal["keep", "template"] = "keep"
    """keep: the model's reasoning stays in its prompt. template: follow the model's chat template; where the template
    drops the reasoning before a new question, a new sequence begins."""
    renderer: str = ""
    """Name of a renderer of the package renderers, such as "qwen3", that writes and reads the model's conversations.
    Empty: the chat template and the parsers below."""
    tool_parser: str = ""
    """Name of an SGLang parser (--tool-call-parser). Empty: <tool_call>{JSON}</tool_call>."""
    reasoning_parser: str = ""
    """Name of an SGLang parser (--reasoning-parser). Empty: <think>...</think>."""
    chat_template: str = ""
    """Jinja chat template; empty: the tokenizer's."""
    chat_template_options: Mapping[str, Any] = field(default_factory=dict)
    """Options passed to the chat template, such as {enable_thinking = false}."""
    servers: tuple[str, ...] = ()
    """Names of [servers] that the agent asks, such as a simulated user: ``task.servers`` has the address of each. A
    sample waits while one is away."""
    model: str = "policy"
    """Model name that the endpoint reports; requests may use any name."""
    host: str = "127.0.0.1"
    """Address to listen on. Use a non-loopback address only for harnesses on other machines: anyone who can reach it
    with a sample's key can sample, and those tokens are trained."""
    port: Annotated[int, Range(low=0, high=65_535)] = 0
    """Port to listen on; 0: any free port."""

    def __post_init__(self) -> None:
        if self.on_timeout == "fail" and self.timeout_reward is not None:
            raise ConfigError(
                "timeout_reward: a sample that took too long has no reward; leave this out, or set "
                'on_timeout = "truncate", and its time-out is an answer with this reward, in its siblings\' baseline'
            )
        for key in ("tool_parser", "reasoning_parser", "chat_template"):
            if getattr(self, key) and self.renderer:
                raise ConfigError(f"renderer: {self.renderer!r} takes the place of {key}; remove one of them")

    @property
    def sets_no_reward(self) -> bool:
        """Whether the run file leaves every sample's reward to the run's reward function."""
        return self.harness == "command" and self.harness_options.get("reward") == "grader"

    def check_machine(self) -> None:
        """Raise ConfigError if the renderer, or the harness's program, module or virtual environment, is missing."""
        try:
            self.load_harness().check_machine()
        except ConfigError as error:
            text = str(error)
            raise ConfigError(text if text.startswith("rollout.") else f"rollout.options.harness: {text}") from None
        if self.renderer:
            check_renderer(self.renderer)

    def load_harness(self) -> Limited:
        """Return the harness wrapped in its limits. Starts no process. Raises ConfigError."""
        return Limited(
            load_harness(self.harness, self.harness_options),
            name=self.harness,
            timeout_seconds=self.timeout_seconds,
            on_timeout=self.on_timeout,
            timeout_reward=self.timeout_reward,
        )


class Agent:
    """A RolloutFn with one endpoint and one harness per worker, and one session per sample."""

    has_harness = True
    """Samples end by themselves within their time limit, so a worker that waits for one is not restarted."""

    def __init__(self, tokenizer: Any, options: Options) -> None:
        """Raises ConfigError."""
        self._options = options
        self._chat_format = _make_chat_format(tokenizer, options)
        self._harness = options.load_harness()
        self._server = EndpointServer(host=options.host, port=options.port, model=options.model)

    async def __call__(self, prompt: PromptGroup, generate: Generate, *, index: int) -> Sequence[Trajectory]:
        if self._options.restart == "never" and generate.attempt > 1:
            raise RolloutError(
                f'the group was begun before, and rollout.options.restart is "never" (attempt {generate.attempt})'
            )
        session = Session(
            generate,
            chat_format=self._chat_format,
            name=f"{prompt.group_id}/{index}",
            max_tokens=prompt.sampling.max_new_tokens,
            context_tokens=generate.context_tokens,
            stop=prompt.sampling.stop,
        )
        task = Task(
            prompt=prompt.prompt,
            messages=await _messages(prompt, generate),
            label=prompt.label,
            metadata=prompt.metadata,
            group_id=prompt.group_id,
            index=index,
            seed=_make_seed(prompt.group_id, index),
            servers={name: _address(generate.servers[name]) for name in self._options.servers},
        )
        try:
            async with self._server.session(session):
                endpoint = Endpoint(base_url=self._server.url, api_key=session.key, model=self._options.model)
                outcome = outcome_of(await self._harness(task, endpoint))
            made = trajectories(session.turns, outcome)
        except RolloutError as error:  # many clients say no more than "400 Bad Request"
            refused = f"; the endpoint had refused a request: {session.refusal}" if session.refusal else ""
            if self._options.restart == "never":  # also not after an outage
                raise RolloutError(f"{error}{refused}") from None
            if not refused:
                raise
            raise type(error)(f"{error}{refused}") from error
        if hung_up := session.num_unreceived:
            said = "the agent of group %d, sample %d, hung up on %d of its calls, whose answers are not trained"
            _log.info(said, prompt.group_id, index, hung_up)
        return made

    async def close(self) -> None:
        await self._harness.close()
        await self._server.close()


def _address(server: ServerAddress) -> dict[str, str]:
    return {"url": server.url, "key": server.key, "model": server.model}


async def _messages(prompt: PromptGroup, generate: Generate) -> Sequence[Mapping[str, Any]]:
    """Return the prompt's messages, with the files of its images."""
    if not prompt.images or generate.images is None:
        return prompt.messages
    return as_data_urls(prompt.messages, [one.data for one in await generate.images.files(prompt.images)])


def trajectories(turns: Turns, outcome: Outcome) -> list[Trajectory]:
    """Return one trajectory per training sequence of a sample; each has the rollout's reward.

    Raises RolloutError if the agent received no answer, or if a turn reward belongs to none that it received.
    """
    sequences = turns.sequences()
    if not sequences:
        raise RolloutError("the harness ended without an answer of the model: there is nothing to train")
    of_turn = _rewards_of_turns(list(turns), outcome.turn_rewards)
    return [_make_trajectory(sequence, outcome, of_turn) for sequence in sequences]


def _rewards_of_turns(
    turns: Sequence[Turn], given: Mapping[str, float | Sequence[float]] | Sequence[float]
) -> dict[int, float]:
    """Return the rewards by the numbers of turns. Raises RolloutError.

    A list is of use only for calls in a row: calls at the same time arrive in any order.
    """
    if not isinstance(given, Mapping):
        if given and len(given) != len(turns):
            raise RolloutError(f"the harness gave {len(given)} turn_rewards for {len(turns)} turns")
        if given and any(turn.after is not before for before, turn in itertools.pairwise(turns)):
            raise RolloutError(
                "the harness gave turn_rewards as a list, but its calls do not continue each other, and may have come "
                'in any order; give them by the ids of the answers: {"chatcmpl-...": 0.5}'
            )
        return {turn.number: reward for turn, reward in zip(turns, given, strict=False)}
    answers: dict[str, list[Turn]] = {}
    for turn in turns:
        answers.setdefault(turn.call, []).append(turn)
    found: dict[int, float] = {}
    for name, value in given.items():
        of_call = next((of_call for call, of_call in answers.items() if name.endswith(call)), [])
        rewards = value if isinstance(value, Sequence) else (value,)
        if not of_call:
            raise RolloutError(f"the harness gave turn_rewards to {name!r}, which is the id of no answer of its sample")
        if len(rewards) != len(of_call):
            raise RolloutError(
                f"the harness gave {len(rewards)} turn_rewards to {name!r}, which has {len(of_call)} answers"
            )
        found |= {turn.number: reward for turn, reward in zip(of_call, rewards, strict=True)}
    return found


def _make_trajectory(sequence: TrainedSequence, outcome: Outcome, of_turn: Mapping[int, float]) -> Trajectory:
    made: Trajectory = replace(
        sequence.trajectory,
        prompt_tokens=sequence.prompt_tokens,
        reward=math.nan if outcome.reward is None else outcome.reward,
        reward_parts={**outcome.metrics, **outcome.reward_parts},
        turn_rewards=tuple(
            TurnReward(start=start, reward=of_turn[number]) for number, start in sequence.turns if number in of_turn
        ),
        finish_reason=outcome.finish_reason or sequence.trajectory.finish_reason,
    )
    return made


def _make_chat_format(tokenizer: Any, options: Options) -> ChatFormat:
    """Return the chat format that the options choose. Raises ConfigError."""
    keeps = options.thinking == "keep"
    if options.renderer:
        return load_renderer(options.renderer, tokenizer, keeps_thinking=keeps, options=options.chat_template_options)
    return TemplateFormat(
        tokenizer,
        parser=SGLangParser(options.tool_parser, options.reasoning_parser)
        if options.tool_parser or options.reasoning_parser
        else None,
        chat_template=options.chat_template,
        options=options.chat_template_options,
        keeps_thinking=keeps,
    )


def _make_seed(group_id: int, index: int) -> int:
    return int(np.random.SeedSequence([group_id, index]).generate_state(1, np.uint64)[0] >> 1)
