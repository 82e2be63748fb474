"""Instructions that a program can verify, on examples made by hand from the paper's descriptions."""

from __future__ import annotations

import json
from typing import Any

import pytest

from asyncrl.contrib.rewards.ifeval import KINDS, follows
from asyncrl.errors import RewardError
from tests.harness.rewards import load, sample, values

FOLLOWED_AND_NOT: dict[str, list[tuple[dict[str, Any], str, str]]] = {
    "keywords:existence": [({"keywords": ["Red", "fox"]}, "A red FOX, foxes.", "A red dog.")],
    "keywords:frequency": [
        ({"keyword": "a", "frequency": 2, "relation": "at least"}, "a cat and A dog", "the cat"),
        ({"keyword": "a", "frequency": 2, "relation": "less than"}, "the cat", "a cat, a dog"),
    ],
    "keywords:forbidden_words": [({"forbidden_words": ["no"]}, "nothing", "No.")],
    "keywords:letter_frequency": [({"letter": "e", "let_frequency": 3, "let_relation": "at least"}, "Eeek", "see")],
    "length_constraints:number_sentences": [
        ({"num_sentences": 2, "relation": "at least"}, "One. Two", "It is 3.5 long."),
        ({"num_sentences": 2, "relation": "less than"}, "One!", "One? Two."),
    ],
    "length_constraints:number_paragraphs": [
        ({"num_paragraphs": 2}, "a\n***\nb", "a\n***\n"),
        ({"num_paragraphs": 2.0}, "***\na\n***\nb\n***", "a\n***\n***\nb"),
    ],
    "length_constraints:number_words": [({"num_words": 3, "relation": "at least"}, "it isn't", "isn't")],
    "length_constraints:nth_paragraph_first_word": [
        ({"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "then"}, 'a\n\n"Then," b', "then a\n\nb"),
        ({"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "then"}, "a\n\n\nThen b", "a\n\n\n\nthen b"),
    ],
    "detectable_content:number_placeholders": [({"num_placeholders": 2}, "[name] at []", "[name] at [place")],
    "detectable_content:postscript": [
        ({"postscript_marker": "P.S."}, "a\n\nP. S. b", "a PS b"),
        ({"postscript_marker": "P.P.S"}, "a p.p.s. b", "a P.S. b"),
    ],
    "detectable_format:number_bullet_lists": [({"num_bullets": 2}, "* a\n\n  -b", "* a\n**b**")],
    "detectable_format:constrained_response": [({}, "My answer is maybe.", "maybe")],
    "detectable_format:number_highlighted_sections": [({"num_highlights": 2}, "*a* and **b**", "*a* and ** **\n*b")],
    "detectable_format:multiple_sections": [
        ({"section_spliter": "Section", "num_sections": 2}, "Section 1\na\nSection 2\nb", "Section 1\nSubsection 2")
    ],
    "detectable_format:json_format": [({}, '```json\n{"a": 1}\n```', "{'a': 1}"), ({}, "[]", "``` a")],
    "detectable_format:title": [({}, "<<On cats>>\nThey sleep.", "<< >>\nThey <<sleep.\n>>")],
    "combination:two_responses": [
        ({}, "a\n******\nb", "a\n******\na"),
        ({}, "******\na******b\n******", "a\n******\n******\nb"),
    ],
    "combination:repeat_prompt": [({"prompt_to_repeat": "Why?"}, "Why? So.", "So. Why?")],
    "startend:end_checker": [({"end_phrase": "That is all."}, "a. that is all.", "That is all. a")],
    "startend:quotation": [({}, '"a"', '"')],
    "change_case:capital_word_frequency": [
        ({"capital_frequency": 1, "capital_relation": "less than"}, "Nasa", "NASA's went"),
        ({"capital_frequency": 2, "capital_relation": "at least"}, "U.S. and WELL-READ", "U.S. and WELL-read"),
    ],
    "change_case:english_capital": [({}, "ALL OF 3", "ALL OF it")],
    "change_case:english_lowercase": [({}, "all of 3", "All of it")],
    "punctuation:no_comma": [({}, "a b", "a, b")],
}


def test_every_instruction_has_a_response_that_follows_it_and_one_that_does_not() -> None:
    assert set(FOLLOWED_AND_NOT) == set(KINDS)
    for kind, cases in FOLLOWED_AND_NOT.items():
        for given, followed, not_followed in cases:
            assert follows(followed, kind, given), (kind, followed)
            assert not follows(not_followed, kind, given), (kind, not_followed)
            assert not follows(" ", kind, given), kind


def label(*instructions: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    return {
        "instruction_id_list": [kind for kind, _ in instructions],
        "kwargs": [{**given, "not_of_this_one": None} for _, given in instructions],
    }


async def test_all_instructions_count_or_their_share() -> None:
    two = label(("punctuation:no_comma", {}), ("keywords:existence", {"keywords": ["cat"]}))
    answers = [sample("a cat", label=two), sample("<think>,</think>a dog", label=two), sample("a, b", label=two)]
    assert await values(load("ifeval"), *answers) == [1.0, 0.0, 0.0]
    assert await values(load("ifeval", score="share"), *answers) == [1.0, 0.5, 0.0]
    assert await values(load("ifeval"), sample("a cat", label=json.dumps(two))) == [1.0]
    assert await values(load("ifeval"), sample("a cat", label="", metadata=two)) == [1.0]


async def test_loose_looks_past_an_introduction() -> None:
    quoted = label(("startend:quotation", {}))
    answer = sample('Sure, here it is:\n"a"', label=quoted)
    assert await values(load("ifeval"), answer) == [0.0]
    assert await values(load("ifeval", loose=True), answer) == [1.0]


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (label(("language:response_language", {"language": "de"})), "'language:response_language' is not known"),
        (label(("punctuation:no_comma", {}), ("new:kind", {})), "'new:kind' is not known"),
        (label(("keywords:frequency", {"keyword": "a"})), "'keywords:frequency' cannot take"),
        (label(("keywords:frequency", {"keyword": "a", "frequency": 1, "relation": "about"})), "'about' must be"),
        (label(("keywords:existence", {"keywords": "cat"})), "must be a list of words"),
        (label(("keywords:letter_frequency", {"letter": "ab", "let_frequency": 1})), "cannot take"),
        (label(("length_constraints:number_paragraphs", {"num_paragraphs": "2"})), "a whole number, is '2'"),
        (label(("detectable_format:number_bullet_lists", {"num_bullets": 1.5})), "a whole number, is 1.5"),
        (label(("detectable_format:title", {"num_bullets": 1})), "cannot take"),
        ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}, {}]}, "a list of 1 tables"),
        ({"kwargs": []}, "must hold instruction_id_list, a list of names"),
        ("[", "not a table of instructions"),
    ],
)
async def test_an_instruction_that_cannot_be_checked_fails_by_name(wrong: Any, reason: str) -> None:
    with pytest.raises(RewardError, match=reason):
        await load("ifeval")([sample("a", label=wrong)])


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_no_instruction_raises_or_backtracks_on_what_models_write(kind: str) -> None:
    """In quadratic time, this length would take minutes."""
    given = FOLLOWED_AND_NOT[kind][0][0]
    for text in ("a", "*", "[", "<<a", "- ", "```json\n", "\n", " ", ". ", "{", '"', "P.S.", "\0\ud800", "a-", "***"):
        assert follows(text * (200_000 // len(text)), kind, given) in (True, False)
