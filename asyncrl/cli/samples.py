"""`asyncrl samples RUN`: shows what the model writes: prompts, answers, rewards and the fate of each group.

RUN is a run's folder, whether the run is running, finished or killed. From any machine that reaches the bus, it may
also be a run file, or --set bus.url=... --set run.name=... Groups come from RUN_DIR/samples.jsonl, where the learner
writes some of every step (metrics.samples_per_step), and from the trajectory log on the bus. With --evaluation, answers
to evaluation prompts are shown, from RUN_DIR/evaluation_samples.jsonl (metrics.samples_per_evaluation) or the bus, and
those of `asyncrl evaluate` from RUN_DIR/saved_model_samples.jsonl. The command changes nothing: on the bus it is an
observer.

Model output is untrusted: characters that would move a terminal's cursor or change its colours are shown as "?".
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import heapq
import itertools
import json
import random
import re
from collections.abc import Callable, Hashable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from asyncrl.cli import arguments
from asyncrl.errors import ConfigError
from asyncrl.logs import printable, printable_text
from asyncrl.policies.groups.turn_text import TEXT, other_pieces, pieces_of

if TYPE_CHECKING:
    from asyncrl.audit.samples import RunSamples
    from asyncrl.policies.groups.sample import Answer, Decode, GroupSample

LIMIT: Final = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_existing_run(parser)
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--group", type=int, metavar="N", help="show this prompt group; with --evaluation, this prompt of the data sets"
    )
    which.add_argument("--worst", action="store_true", help="show the groups with the lowest-rewarded answers")
    which.add_argument("--random", action="store_true", help="show random groups, the same for the same --seed")
    which.add_argument(
        "--follow", action="store_true", help="show groups as they finish, until Ctrl-C or the run's end"
    )
    parser.add_argument(
        "--evaluation",
        metavar="DATASET",
        nargs="?",
        const="",
        help="show answers to evaluation prompts (of all data sets or only this one) instead of training answers",
    )
    parser.add_argument(
        "--step", type=int, metavar="N", help="only groups trained at step N, or evaluated with the model of step N"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed for --random (default: 0)")
    parser.add_argument("--grep", metavar="REGEX", help="only groups whose prompt, answers or reason match")
    parser.add_argument(
        "--limit", type=int, metavar="N", help=f"show at most N groups (default: {LIMIT}; with --follow: all)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per line instead of text")


def run(options: argparse.Namespace) -> int:
    if options.limit is not None and options.limit < 1:
        raise ConfigError(f"--limit {options.limit}: must be 1 or more")
    try:
        pattern = re.compile(options.grep) if options.grep else None
    except re.error as error:
        raise ConfigError(f"--grep {options.grep}: is not a regular expression: {error}") from None

    if options.where is None and options.evaluation and Path(options.evaluation).exists():
        raise ConfigError(f"--evaluation {options.evaluation}: is no data set; write RUN before --evaluation")

    from asyncrl.audit import run_folder  # imports numpy; --help works without
    from asyncrl.audit.evaluated import EvaluationSamples
    from asyncrl.audit.samples import RunSamples

    run_config = run_folder.run_at(options.where, options.overrides, verb="samples", needs_bus=options.follow)
    folder = options.where if options.where is not None and options.where.is_dir() else None
    if folder is None and run_folder.RecordedRun(run_config.run_directory).is_run:
        folder = run_config.run_directory
    token = arguments.bus_token(run_config)
    source = (
        RunSamples(run_config, folder, token=token)
        if options.evaluation is None
        else EvaluationSamples(run_config, folder, token=token, dataset=options.evaluation)
    )
    shown = _Printer(source, as_json=options.json)
    is_wanted = _make_filter(pattern, options.step, shown, place=options.group if source.is_of_evaluations else None)
    if options.follow:
        source.require_dataset()
        _follow(source, shown, is_wanted, limit=options.limit)
        return 0
    if options.group is not None and options.evaluation is None:
        return _show_one(source, shown, options.group)
    best = _choose(options, is_wanted)
    is_all_read = options.worst or options.random or pattern or options.step is not None or options.group is not None
    _collect(source, shown, best, newest=0 if is_all_read else 4 * best.limit)
    if not (groups := best.groups()):
        source.require_dataset()
    for group in groups:
        shown.show(group)
    shown.footer(len(groups), matching=options.grep)
    return 0


# -- which groups ------------------------------------------------------------------------------------------------------


class _Best:
    """Keeps at most ``limit`` of the offered groups that are wanted: those with the smallest ``rank``."""

    def __init__(self, rank: Callable[[GroupSample], float], is_wanted: Callable[[GroupSample], bool], limit: int):
        self._rank = rank
        self._is_wanted = is_wanted
        self.limit = limit
        self._heap: list[tuple[float, int, int, GroupSample]] = []  # largest rank first
        self._count = itertools.count()
        self._seen: set[Hashable] = set()

    def offer(self, group: GroupSample) -> None:
        """Offer a group.

        The first of several groups with the same id counts: a recorded group has more information than the one on the
        log.
        """
        if group.identity in self._seen:
            return
        self._seen.add(group.identity)
        entry = (-self._rank(group), -group.group_id, next(self._count), group)
        if len(self._heap) == self.limit and entry < self._heap[0]:
            return
        if self._is_wanted(group):
            (heapq.heappush if len(self._heap) < self.limit else heapq.heappushpop)(self._heap, entry)

    def groups(self) -> list[GroupSample]:
        """Return the groups with the smallest rank last, next to the shell prompt."""
        return [group for *_, group in sorted(self._heap, key=lambda entry: entry[:3])]


def _choose(options: argparse.Namespace, is_wanted: Callable[[GroupSample], bool]) -> _Best:
    limit = options.limit or LIMIT
    if options.worst:
        return _Best(lambda group: group.worst, is_wanted, limit)
    if options.random:
        return _Best(lambda group: random.Random(f"{options.seed}/{group.identity}").random(), is_wanted, limit)
    if options.evaluation is not None:  # saved models are evaluated in any order, and each starts at prompt 0
        return _Best(lambda group: -group.time, is_wanted, limit)
    return _Best(lambda group: -group.group_id, is_wanted, limit)


def _make_filter(
    pattern: re.Pattern[str] | None, step: int | None, shown: _Printer, *, place: int | None
) -> Callable[[GroupSample], bool]:
    """place: position of a prompt in its data set"""

    def is_wanted(group: GroupSample) -> bool:
        if place is not None and group.place != place:
            return False
        if step is not None and (group.step != step or group.fate not in ("trained", "evaluated")):
            return False
        if pattern is None:
            return True
        group = shown.decode(group)
        texts = [group.prompt or "", group.reason, group.label, *(answer.text for answer in group.answers)]
        return any(pattern.search(text) for text in texts)

    return is_wanted


def _collect(source: RunSamples, shown: _Printer, best: _Best, *, newest: int) -> None:
    for group in source.read_file():
        best.offer(group)
    with source.bus_address() as address:
        if address is None:
            return

        async def read() -> None:
            async with (
                source.connect(address) as bus,
                contextlib.aclosing(source.read_log(bus, newest=newest)) as groups,
            ):
                async for group in groups:
                    best.offer(group)

        asyncio.run(read())


def _show_one(source: RunSamples, shown: _Printer, group_id: int) -> int:
    """Show one group, or what is known about it."""
    best = _Best(lambda group: 0.0, lambda group: group.group_id == group_id, 1)
    _collect(source, shown, best, newest=0)
    if found := best.groups():
        shown.show(found[0])
        return 0
    if (fate := source.fates.of.get(group_id)) is None:
        last = max(source.fates.of, default=-1)
        raise ConfigError(f"--group {group_id}: no such group is recorded; groups 0 to {last} are done")
    shown.say(
        f"group {group_id}   {fate.kind} at step {fate.step}{f'   {fate.reason}' if fate.reason else ''}: its text is "
        f"not here. {source.why_none()}"
    )
    return 0


def _follow(
    source: RunSamples, shown: _Printer, is_wanted: Callable[[GroupSample], bool], *, limit: int | None
) -> None:
    if source.directory is not None:
        with contextlib.closing(source.follow_file()) as growing:
            for group in itertools.islice(filter(is_wanted, growing), limit):
                shown.show(group)
        return

    async def read() -> None:
        count = 0
        async with source.connect(source.address) as bus, contextlib.aclosing(source.follow_log(bus)) as groups:
            async for group in groups:
                if is_wanted(group):
                    shown.show(group)
                    count += 1
                if count == limit:
                    return

    asyncio.run(read())


# -- what a person sees ------------------------------------------------------------------------------------------------


class _Printer:
    """Prints groups, decoded with the run's tokenizer if it is available here."""

    def __init__(self, source: RunSamples, *, as_json: bool) -> None:
        self._source = source
        self._as_json = as_json
        self._model = source.run.model.path
        self._decode: Decode | None = None
        self._problem = ""

    def decode(self, group: GroupSample) -> GroupSample:
        """Return the group with its text, or unchanged if the tokenizer is not available here."""
        from asyncrl.data.tokenizer import load_decode
        from asyncrl.policies.groups.sample import decoded

        if group.prompt is not None or self._problem:
            return group
        try:
            self._decode = self._decode or load_decode(self._model)
        except ConfigError as error:
            self._problem = str(error)
            return group
        try:
            return decoded(group, self._decode)
        except Exception as error:  # a worker may send any token ids
            return dataclasses.replace(group, prompt=f"(no text: {type(error).__name__}: {error})")

    def show(self, group: GroupSample) -> None:
        group = self.decode(group)
        if self._as_json:
            print(json.dumps(group.as_shown() | ({"undecoded": self._problem} if group.prompt is None else {})))
        else:
            print("\n".join(lines(group, problem=self._problem)) + "\n", flush=True)

    def say(self, text: str) -> None:
        print(json.dumps({"note": text}) if self._as_json else printable(text))

    def footer(self, count: int, *, matching: str | None) -> None:
        if self._as_json:
            return
        if self._source.is_of_evaluations:
            self._evaluation_footer(count, matching=matching)
            return
        known = len(self._source.fates.of)
        which = f" that match {matching}" if matching else ""
        groups = "group" if count == 1 else "groups"
        text = f"{count} {groups}{which} shown, of {known:,} that are done (trained, dropped, failed or filtered)"
        print(printable(text + (f". {self._source.why_none()}" if self._source.why_no_log else "")))

    def _evaluation_footer(self, count: int, *, matching: str | None) -> None:
        which = f" that match {matching}" if matching else ""
        text = f"answers to {count} {'prompt' if count == 1 else 'prompts'}{which} shown"
        print(printable(text if count else f"{text}. {self._source.why_none()}"))


def lines(group: GroupSample, *, problem: str = "") -> Iterator[str]:
    """Format a group as text. ``problem``: why its text is missing, if it is."""
    became = {"trained": f"trained at step {group.step}", "pending": "pending", "unknown": "fate unknown"}
    became |= {"evaluated": f"of {group.model}"} if group.model else {}
    head = [group.name, became.get(group.fate, f"{group.fate} at step {group.step}")]
    head += [f"({group.reason})"] if group.reason else []
    head += [f"reward {group.reward:.3f}"] if group.reward is not None else []
    head += [f"staleness {group.staleness}"] if group.staleness is not None else []
    head += [f"worker {group.worker}"] if group.worker else []
    head += [f"{group.seconds:.1f} s"] if group.seconds else []
    yield printable("   ".join(head))
    if problem and group.prompt is None:
        yield f"  no text: {printable(problem)}"
    yield "prompt"
    yield from _indent(group.prompt if group.prompt is not None else _ids(group.prompt_tokens))
    if group.label:
        yield "label"
        yield from _indent(group.label)
    most = max([sum(not one.part for one in group.answers), *(one.rollout + 1 for one in group.answers)])
    for index, answer in enumerate(group.answers):
        yield printable(_heading(answer, title=group.title(index), of=most))
        yield from _answer(answer)


def _answer(answer: Answer) -> Iterator[str]:
    """Yield the answer's own prompt, if any, then its turns: model output, thoughts, tool calls and results."""
    if answer.prompt_tokens:
        yield "  [its own prompt]"
        if answer.prompt is None:
            yield from _indent(_ids(answer.prompt_tokens))
        for piece in other_pieces(answer.prompt or ""):
            yield from () if piece.kind == TEXT else (f"  [{printable(piece.kind)}]",)
            yield from _indent(piece.text)
    if not answer.turns:
        yield from _indent(_ids(answer.tokens))
    pieces, titles = pieces_of(answer.turns), answer.titles
    if len(answer.turns) == len(pieces) == 1 and pieces[0].kind == TEXT and not answer.prompt_tokens:
        yield from _indent(answer.text)
        return
    for piece in pieces:
        title = titles[piece.turn] if piece.turn < len(titles) else answer.turns[piece.turn][0]
        if piece.kind != TEXT:
            title = piece.kind if answer.turns[piece.turn][0] != "policy" else f"{title}: {piece.kind}"
        yield f"  [{printable(title)}]"
        yield from _indent(piece.text)


def _heading(answer: Answer, *, title: str, of: int) -> str:
    parts = ", ".join(f"{name} {value:g}" for name, value in answer.parts.items())
    text = [title if ", part" in title else f"{title} of {of}"]
    text += [f"reward {answer.reward:.3f}" + (f" ({parts})" if parts else "")] if answer.reward is not None else []
    text += [f"advantage {answer.advantage:+.3f}"] if answer.advantage is not None else []
    text += [f"staleness {answer.staleness}"] if answer.staleness is not None else []
    text += [f"{answer.old_tokens} tokens too old"] if answer.old_tokens else []
    text += [f"{len(answer.tokens)} tokens", answer.finish_reason]
    versions = [version for _, _, version in answer.versions]
    if versions:
        newest = max(versions)
        text += [f"versions {min(versions)}-{newest}" if len(set(versions)) > 1 else f"version {newest}"]
    return "   ".join(text)


def _indent(text: str) -> Iterator[str]:
    return (f"  {line}" for line in printable_text(text).split("\n"))


def _ids(tokens: Iterable[int]) -> str:
    return "tokens " + " ".join(map(str, tokens))
