"""Turns form sequences: each answer is trained once, on exactly the context that it continued."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.engines.generation import Generation
from asyncrl.environments.agent.endpoint.turns import Tags, Turn, Turns, call_id
from asyncrl.messages import VersionSpan


def turn(number: int, given: list[int], said: list[int], parent: Turn | None = None) -> Turn:
    answer = Generation(
        tokens=np.array(said, np.int32),
        logprobs=np.full(len(said), -1.0 - number, np.float32),
        version_spans=(VersionSpan(start=0, incarnation=0, policy_version=number),),
        finish_reason="stop",
    )
    return Turn(number=number, tag=str(number), parent=parent, given=np.array(given, np.int32), answer=answer)


def test_a_branch_begins_with_what_it_shares_as_its_prompt() -> None:
    r"""0 -> 1 -> 2, and 0 -> 3: the second sequence trains only 3."""
    turns = Turns()
    root = turn(0, [1, 2], [3])
    first = turn(1, [4], [5, 6], root)
    for one in (root, first, turn(2, [7], [8], first), turn(3, [9], [10], root)):
        turns.add(one)
    long, short = turns.sequences()
    assert (long.prompt_tokens.tolist(), long.trajectory.tokens.tolist()) == ([1, 2], [3, 4, 5, 6, 7, 8])
    assert long.trajectory.response_mask.tolist() == [True, False, True, True, False, True]
    assert long.turns == ((0, 0), (1, 2), (2, 5))
    assert (short.prompt_tokens.tolist(), short.trajectory.tokens.tolist()) == ([1, 2, 3, 9], [10])
    assert [span.policy_version for span in short.trajectory.version_spans] == [3]


def test_an_empty_answer_does_not_take_those_that_it_continues_out_of_training() -> None:
    turns = Turns()
    root = turn(0, [1], [2])
    for one in (root, turn(1, [3], [], root)):
        turns.add(one)
    (sequence,) = turns.sequences()
    assert (sequence.trajectory.tokens.tolist(), sequence.turns) == ([2], ((0, 0),))


@given(st.lists(st.tuples(st.integers(-1, 9), st.lists(st.integers(0, 2), max_size=3), st.integers(0, 3)), max_size=10))
def test_every_answer_is_trained_once_on_what_it_continued(shape: list[tuple[int, list[int], int]]) -> None:
    turns, made = Turns(), list[Turn]()
    for number, (above, new, length) in enumerate(shape):
        parent = made[above] if 0 <= above < number else None
        made.append(turn(number, new if parent else [7, *new], [number % 3] * length, parent))
        turns.add(made[-1])
    left = {one.number: one for one in made}
    for sequence in turns.sequences():
        whole = [*sequence.prompt_tokens.tolist(), *sequence.trajectory.tokens.tolist()]
        for number, start in sequence.turns:
            one, at = left.pop(number), len(sequence.prompt_tokens) + start
            assert whole[:at] == one.context.tolist()
            assert whole[: at + len(one.answer.tokens)] == one.tokens.tolist()
        sampled = sum(len(made[number].answer.tokens) for number, _ in sequence.turns)
        assert sequence.trajectory.response_mask.sum() == sampled
    assert not any(len(one.answer.tokens) for one in left.values())


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=3), max_size=6), st.lists(st.integers(0, 1)))
def test_the_longest_prefix_is_the_longest_of_all(paths: list[list[int]], tokens: list[int]) -> None:
    turns, made = Turns(), list[Turn]()
    for number, said in enumerate(paths):
        made.append(turn(number, [number % 2], said, made[-1] if number % 3 else None))
        turns.add(made[-1])
    found, length = turns.longest_prefix(np.array(tokens, np.int32))
    fitting = [len(one.tokens) for one in made if tokens[: len(one.tokens)] == one.tokens.tolist()]
    assert length == max(fitting, default=0)
    assert (found is None) == (not fitting)


def test_tags_depend_on_session_prompt_and_occurrence_not_on_order() -> None:
    one, two = np.array([1], np.int32), np.array([2], np.int32)
    tags, other = Tags("0/0"), Tags("0/0")
    first = [tags.next(one), tags.next(two), tags.next(one)]
    assert [other.next(tokens) for tokens in (two, one, one)] == [first[1], first[0], first[2]]
    assert len({*first, Tags("0/1").next(one)}) == 4
    assert call_id(first[0], 0) != call_id(first[0], 1)
