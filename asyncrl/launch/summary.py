"""The meaning of a run file with every default resolved: what `asyncrl check` prints, as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.adapters import learner_models, registry
from asyncrl.config import RunConfig, secret_values
from asyncrl.config.secret_values import hide_credentials
from asyncrl.config.staleness_bound import beyond_what_was_shown
from asyncrl.config.toml_text import toml_text
from asyncrl.errors import ConfigError
from asyncrl.launch import colocated
from asyncrl.launch.assembly import data
from asyncrl.launch.checks.run_file import check, check_before_torch
from asyncrl.launch.launchers.adapter import launcher_class
from asyncrl.launch.processes import gpus
from asyncrl.rewards.load import oddities as reward_oddities

if TYPE_CHECKING:
    from asyncrl.backends.gpu_memory import Phase
    from asyncrl.policies import component
    from asyncrl.policies.algorithms.algorithm import Algorithm


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One component of an algorithm, with the options that are used in training."""

    name: str
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A checked run file. ``str`` of it is what `asyncrl check FILE --all` prints.

    settings     every key of the run file, defaults filled in
    algorithm    name of the algorithm; ``paper`` is its publication, or ""
    correction   corrections, in the order in which they are applied
    models       folder of each model that the learner loads, by name: "policy", "critic", ...
    num_prompts  prompts in the data
    num_looked_at, num_too_long  number of prompts that were tokenised, and how many of them exceed
                                 ``most_prompt_tokens`` and will be dropped
    has_labels   whether a prompt that was tokenised has a label
    first_prompt the first prompt as the model sees it, and its label or answer: pairs of title and text
    oddities     one line for each thing about prompts and reward that is hardly ever meant
    evaluation   number of prompts of each data set of [evaluation]
    gpus         the GPUs of each process, as text
    memory       what a rank of the learner needs in each phase, an estimate; empty on a CPU
    beside_learner  what an engine has beside the learner on this machine's GPU, or would have on another; or empty
    old_tokens   what speaks against training tokens this old at this learning rate, one line; empty: nothing known
    routing_replay  whether the learner routes tokens to the experts that the engine chose
    shared_prefixes  whether the learner computes tokens once that sequences begin with
    """

    settings: RunConfig
    algorithm: str
    paper: str
    advantage: Component
    loss: Component
    aggregation: Component
    correction: tuple[Component, ...]
    models: Mapping[str, Path]
    num_prompts: int
    num_looked_at: int
    num_too_long: int
    most_prompt_tokens: int
    has_labels: bool
    first_prompt: tuple[tuple[str, str], ...]
    oddities: tuple[str, ...]
    evaluation: Mapping[str, int]
    gpus: str
    memory: tuple[Phase, ...]
    beside_learner: str
    old_tokens: str
    routing_replay: registry.RoutingReplay
    shared_prefixes: registry.Choice

    @property
    def max_staleness(self) -> int:
        """Maximum age of a trained token, in policy versions."""
        return self.settings.max_staleness

    @property
    def window(self) -> int:
        """Maximum number of prompt groups in flight."""
        return self.settings.window

    @property
    def num_trained_prompts(self) -> int:
        """Prompts that the run trains, with repetitions: whole batches, limited by run.steps and data.epochs.

        A maximum where the data may end first: filtered groups are not trained, and prompts that were not looked at may
        be too long.
        """
        of_batch, epochs = self.settings.learner.groups_per_batch, self.settings.data.epochs
        of_steps = self.settings.run.steps * of_batch
        usable = data.num_usable(self.settings, self.num_prompts, num_too_long=self.num_too_long)
        return min(of_steps, epochs * usable // of_batch * of_batch) if epochs else of_steps

    @property
    def samples_per_step(self) -> int:
        return self.settings.learner.groups_per_batch * self.settings.rollout.group_size

    @property
    def largest_group_bytes(self) -> int:
        return self.settings.largest_group_bytes + self.routing_replay.num_bytes

    def __str__(self) -> str:
        return self.text(every_key=True)

    def text(self, *, every_key: bool = False) -> str:
        """Return what `asyncrl check` prints.  every_key: also the keys that have their defaults"""
        return "\n".join([*_sections(self.settings, every_key=every_key), "# what follows", *_consequences(self)])


def summarize(run: RunConfig, *, report: Callable[[str], None] = lambda what: None, gpu_bytes: int = 0) -> Summary:
    """Check the run file and every row of its data. Raises ConfigError for the first problem.

    report     called before each wait of seconds with what is being read
    gpu_bytes  of each of the learner's GPUs, if they are not this machine's
    """
    check_before_torch(run)
    report(f"reading {run.data.where} ...")
    found = data.index_rows(run)
    data.require_batch(run, found.num_rows)
    data.check_evaluation_rows(run)
    report(f"importing torch and transformers, reading {run.model.path} ...")
    check(run, is_here=not gpu_bytes)
    placed = None if launcher_class(run).places or gpu_bytes else gpus.placement(run)
    beside = {} if placed is None else placed.beside_learner
    algorithm = registry.algorithm(run)
    rows = data.open_rows(run, found)
    looked = rows.check_first_rows()
    data.require_batch(run, rows.num_rows, num_too_long=rows.dropped)
    sets = data.open_evaluation_sets(run) if run.evaluation.datasets else []
    return Summary(
        settings=run,
        algorithm=algorithm.name,
        paper=algorithm.paper,
        advantage=_component(algorithm.advantage),
        loss=_component(algorithm.loss),
        aggregation=_component(algorithm.aggregation),
        correction=tuple(_component(step) for step in algorithm.correction),
        models={"policy": Path(run.model.path)} | learner_models.folders(run, algorithm),
        num_prompts=rows.num_rows,
        num_looked_at=looked.num_rows,
        num_too_long=rows.dropped,
        most_prompt_tokens=rows.most_tokens,
        has_labels=looked.has_labels,
        first_prompt=looked.shown,
        oddities=(
            *looked.oddities,
            *(line for one in sets for line in one.oddities),
            *reward_oddities(run.reward),
            *learner_models.oddities(run, algorithm),
        ),
        evaluation={one.name: len(one.questions) for one in sets},
        gpus=str(placed or ("of another machine" if gpu_bytes else "found by the launcher")),
        memory=tuple(registry.backend_class(run).memory(run, algorithm, gpu_bytes=gpu_bytes)),
        beside_learner=_beside_learner(run, max(beside.values(), default=1), gpu_bytes) if gpu_bytes or beside else "",
        old_tokens=_of_old_tokens(run, algorithm),
        routing_replay=registry.routing_replay(run),
        shared_prefixes=registry.shared_prefixes(run),
    )


def _beside_learner(run: RunConfig, num_engines: int, gpu_bytes: int) -> str:
    is_possible = run.num_workers and colocated.is_at_once(run) and not launcher_class(run).places
    if not is_possible or not (least := registry.engine_class(run).gpu_bytes(run)):
        return ""
    try:
        share = colocated.engine_share(run, num_engines=num_engines, gpu_bytes=gpu_bytes)
    except ConfigError as error:
        return f"no: {error}"
    return f"an engine has {share / 2**30:.1f} GiB there, and needs {least / 2**30:.1f} at least (estimated)"


def _of_old_tokens(run: RunConfig, algorithm: Algorithm) -> str:
    """What is not sampled by the policy has no age that matters."""
    if algorithm.loss.is_supervised:
        return ""
    return beyond_what_was_shown(
        run.learner.learning_rate,
        run.max_staleness,
        steps=run.learner.steps_per_batch,
        trains_adapters=run.learner.lora.rank > 0,
        loss=algorithm.loss.name,
    )


def _component(one: component.Component) -> Component:
    return Component(name=one.name, options=one.options)


# -- for a person ------------------------------------------------------------------------------------------------------


def _sections(run_config: RunConfig, *, every_key: bool) -> list[str]:
    """Return the run file as TOML lines with every default filled in, or without the defaults; secrets left out."""
    lines = []
    for name, section in secret_values.settings_without_secrets(run_config).items():
        own = getattr(run_config, name)
        if name == "servers":
            lines += [line for one in section for line in _server_lines(one, section[one], every_key=every_key)]
            continue
        shown = [key for key in section if every_key or getattr(own, key) != _default(own, key)]
        if shown:
            lines += [f"[{name}]", *(f"{key} = {toml_text(section[key])}" for key in shown), ""]
    if not every_key:
        lines += ["# all other keys have their defaults, which `asyncrl check FILE --all` prints", ""]
    return lines


def _server_lines(name: str, section: Mapping[str, Any], *, every_key: bool) -> list[str]:
    kept = {key: value for key, value in section.items() if every_key or value not in ("", [], {}, "auto")}
    return [f"[servers.{name}]", *(f"{key} = {toml_text(value)}" for key, value in kept.items()), ""]


def _default(section: Any, key: str) -> Any:
    (its,) = (one for one in dataclasses.fields(section) if one.name == key)
    return its.default if its.default_factory is dataclasses.MISSING else its.default_factory()


def _consequences(summary: Summary) -> list[str]:
    run_config = summary.settings
    why = ", ".join(filter(None, (run_config.run.mode, run_config.why_staleness_bound)))
    plural = "" if summary.max_staleness == 1 else "s"
    bound = f"{summary.max_staleness} version{plural} ({why})"
    is_most = run_config.data.epochs and (summary.num_looked_at < summary.num_prompts or run_config.algorithm.filters)
    return [
        f"algorithm         {summary.algorithm}" + (f", {summary.paper}" if summary.paper else ""),
        f"advantage         {_in_words(summary.advantage)}",
        f"loss              {_in_words(summary.loss)}",
        f"aggregation       {_in_words(summary.aggregation)}",
        f"correction        {' + '.join(map(_in_words, summary.correction))}",
        f"models            {', '.join(f'{name} {folder}' for name, folder in summary.models.items())}",
        f"staleness bound   {bound}",
        *([f"old tokens        {summary.old_tokens}"] if summary.old_tokens else []),
        f"window            {summary.window} groups = (max_staleness {summary.max_staleness} + 1) x "
        f"groups_per_batch {run_config.learner.groups_per_batch}",
        f"data              {summary.num_prompts:,} prompts, {'at most ' if is_most else ''}"
        f"{summary.num_trained_prompts:,} trained",
        f"prompts looked at {summary.num_looked_at:,}, {summary.num_too_long:,} of them over "
        f"{summary.most_prompt_tokens:,} tokens (dropped)",
        *([] if summary.has_labels else [f"labels            none in {run_config.data.label_key!r} (data.label_key)"]),
        *(f"evaluation        {name}: {count:,} prompts" for name, count in summary.evaluation.items()),
        *(f"{title:18s}{text}" for title, text in summary.first_prompt),
        f"samples per step  {summary.samples_per_step}",
        f"routing replay    {summary.routing_replay}",
        f"shared prefixes   {summary.shared_prefixes}",
        f"largest group     {summary.largest_group_bytes:,} bytes; "
        f"bus.max_group_bytes = {run_config.bus.max_group_bytes:,}",
        *(
            f"server            {name}: {one.path or hide_credentials(one.url)}"
            for name, one in run_config.servers.items()
        ),
        f"GPUs              {summary.gpus}",
        *([f"memory of a rank  {_in_gib(summary.memory)}"] if summary.memory else []),
        *([f"beside a learner  {summary.beside_learner}"] if summary.beside_learner else []),
        f"weights           loaded {run_config.load.replace('_', ' ')}, kept in {run_config.weights_directory}",
        f"files             {run_config.run_directory}",
        *(f"odd               {line}" for line in summary.oddities),
    ]


def _in_words(one: Component) -> str:
    options = ", ".join(f"{key} = {toml_text(value)}" for key, value in one.options.items())
    return f"{one.name} ({options})" if options else one.name


def _in_gib(memory: tuple[Phase, ...]) -> str:
    on_gpu = ", ".join(f"{phase.name} {phase.device / 2**30:.1f}" for phase in memory)
    host = max(phase.host for phase in memory)
    return f"{on_gpu} GiB on its GPU; at most {host / 2**30:.1f} GiB of the host's (estimated)"
