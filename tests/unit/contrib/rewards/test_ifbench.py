"""Instructions of IFBench, on examples made by hand from each instruction."""

from __future__ import annotations

import json
from string import ascii_uppercase
from typing import Any

import pytest

from asyncrl.contrib.rewards.ifbench import KINDS, follows
from asyncrl.contrib.rewards.ifbench_checks import sentences, syllables
from asyncrl.errors import RewardError
from tests.harness.rewards import load, sample, values

PALINDROMES = "level radar civic kayak rotor refer madam solos stats tenet"
CAPITALS = (
    "Reykjavík, Helsinki, Oslo, Tallinn, Stockholm, Riga, Moscow, Copenhagen, Vilnius, Minsk, Dublin, Berlin, "
    "Amsterdam, Warsaw, London, Brussels, Prague, Luxembourg, Paris, Vienna, Bratislava, Budapest, Vaduz, Chișinău, "
    "Bern, Ljubljana, Zagreb"
)
COUNTRIES = "\n".join(["Zimbabwe", *sorted((f"A{n:02}" for n in range(51)), reverse=True)])
CHOICES = "\nA) a\nB) b\nC) c\nD) d\nE) e"
QUESTIONS = "\n\n".join(f"Question {n}: {'Who? ' * n}{CHOICES}" for n in range(1, 5))
CITIES = "ID,Country,City,Year,Count\n" + "\n".join(f'{n},France,"Paris, Texas",1999,3' for n in range(7))
PRODUCTS = "ProductID,Category,Brand,Price,Stock\n" + "\n".join(f"{n},Food,Acme,3,1" for n in range(13))
GRADES = "\n".join("\t".join(f'"{x}"' for x in row) for row in ("abcde", "fghij", "klmno"))
COLUMNS = "\t".join(f'"{name}"' for name in ("StudentID", "Subject", "Grade", "Semester", "Score"))
KEYWORDS = {"keyword1": "ant", "keyword2": "bee", "keyword3": "cat", "keyword4": "dog", "keyword5": "Elk"}
COUNTED = "ant" + " bee" * 2 + " cat" * 3 + " dog" * 5 + " elk" * 7
STORY = " ".join(f"{letter}ll went well." for letter in ascii_uppercase)

FOLLOWED_AND_NOT: dict[str, list[tuple[dict[str, Any], str, str]]] = {
    "count:word_count_range": [
        ({"min_words": 2.0, "max_words": 3}, "it isn't", "one two three four"),
        ({"min_words": 2, "max_words": 2}, "naïve 日本", "naïve"),
    ],
    "count:unique_word_count": [({"N": 3}, "Red, red blue - GREEN", "red Red red! - -")],
    "count:conjunctions": [({"small_n": 2}, "This, or that, but…", "and And and, andes")],
    "count:person_names": [({"N": 2}, "Emma's Noah", "Emma and emma and Emmanuel and Anna")],
    "count:numbers": [({"N": 2}, "1,234.5 of 2020-21", "3"), ({"N": 0}, "none", "a1")],
    "count:words_japanese": [
        ({"N": 2}, "one 二つ three カナ five", "one 二つ three four"),
        ({"N": 3}, "a b 12 d e かな", "a b c"),
    ],
    "count:pronouns": [({"N": 3}, "It's she/her.", "Iт is theirs: the items")],
    "count:punctuation": [
        ({}, "What?! No, yes; so: one! Two? Three.", "What?! No, yes; so: one. Three!"),
        ({}, "A‽ b, c; d: e! f? g.", "a, c; d: e! f? g."),
    ],
    "count:keywords_multiple": [(KEYWORDS, COUNTED, COUNTED + " elk"), (KEYWORDS, COUNTED.upper(), "ant bee")],
    "ratio:stop_words": [({"percentage": 50}, "the cat", "the the cat"), ({"percentage": 50}, "Dogs don't bark", "to")],
    "ratio:sentence_type": [
        ({}, 'One. Two. "Three?"', "One. Two?"),
        ({}, "A. B? C. D. E? F. G!", "No end! None"),
    ],
    "ratio:sentence_balance": [({}, "One. Two? Three!", "One. Two?"), ({}, "A! B! C? D? E. F.", "nothing at all")],
    # The reference has abc, bcd, cde. Both trigrams of "abcd" are among them, and one of "abcx".
    "ratio:overlap": [
        ({"reference_text": "abcde", "percentage": 99}, "abcd", "abcx"),
        ({"reference_text": "abcde", "percentage": 50}, "abcx", "ab"),
    ],
    "ratio:sentence_words": [({}, "One cat. Two dog. Six fox.", "One cat. Two dogs. A fox."), ({}, "A. B! C?", "A.")],
    "words:alphabet": [({}, "Yes, Zoe, all be calm", "Yes zoe be"), ({}, "x", "1 a b"), ({}, "a b", "?!")],
    "words:vowel": [({}, "A bee is in", "a bee is out"), ({}, "hmm\n", "a\nb")],
    "words:consonants": [({}, "Strong myths fly", "strong a"), ({}, "add", "naïve")],
    "words:palindrome": [({}, PALINDROMES, PALINDROMES[:-1]), ({}, "LEVEL, " * 10, "noon " * 10)],
    "words:prime_lengths": [({}, "It's, and", "It will not"), ({}, "日本", "!")],
    "words:repeats": [({"small_n": 2}, "so So, it", "so so, SO"), ({"small_n": 1}, "a b", "a a")],
    "words:odd_even_syllables": [({}, "The table sat under one", "The cat sat"), ({}, "banana river", "river table")],
    "words:last_first": [({}, "I saw it. It ran! Ran where?", "I saw it. He ran."), ({}, "one", "a. - . b.")],
    "words:paragraph_last_first": [({}, 'So, it is "so"!\n\nWe are we.', "So it is so.\nWe are."), ({}, "one", "a b")],
    "words:no_consecutive": [({}, "All big cats", "Big, bad"), ({}, "élan envy", "élan étude")],
    "words:keywords_specific_position": [
        ({"keyword": " Cat", "n": 2.0, "m": 2}, "One. The, cat sat", "The cat. A dog"),
        ({"keyword": "don't", "n": 1, "m": 2}, "We don't.", "We"),
    ],
    "words:words_position": [
        ({"keyword": "cat"}, "The Cat saw a cat, too.", "The cat saw a dog, too."),
        ({"keyword": "a"}, "x a b", "a"),
    ],
    "sentence:alliteration_increment": [
        ({}, "We ran. Big bad wolf. Tom took ten.", "Big bad wolf. Tom took it."),
        ({}, "one", "Tom took ten. No."),
    ],
    "sentence:keyword": [
        ({"word": "cat", "N": 2.0}, "One. The CAT's.", "The cat. Cats"),
        ({"word": "c++", "N": 1}, "In C++.", "In C+"),
    ],
    "sentence:increment": [({"small_n": 2}, "One. One two - three! One two three four five", "One. One two."),
                           ({"small_n": 0}, "One. Two.", "One. Two more.")],
    "format:parentheses": [({}, "([{(()) }])", "((((a))))"), ({}, "](((((a)", "(((((]")],
    "format:quotes": [({}, "\"a 'b \"c\" d' e\"", "\"a 'b' c\""), ({}, "'\"''\"'", "\"a\" 'b' \"c\"")],
    "format:options": [
        ({"options": "yes/no/maybe"}, "Yes.", "yes, maybe"),
        ({"options": "I know or I don't know"}, '"I don\'t know"', "I do"),
        ({"options": "a), b), c), d)"}, "a)\n", "A)"),
    ],
    "format:newline": [({}, "one\n\ntwo!", "one two"), ({}, "so -\nit", "one\ntwo three")],
    "format:emoji": [({}, "Hi 🙂. Yes ❤️! Bye. 🎉", "Hi 🙂. Yes."), ({}, "日本 🇯🇵", "🙂 hi"), ({}, "🙂", "?")],
    "format:line_indent": [({}, "a\n b\n\n   c", "a\n b\n c"), ({}, "a", "\ta\n\tb")],
    "format:quote_unquote": [({}, '"a" is b. “c” is d', '"a" "b" is c'), ({}, "a", 'b is "a".')],
    "format:list": [({"sep": "!?!?"}, "!?!? a\n!?!? b", "!?!? a"), ({"sep": "..."}, "... a\n... b", "- a")],
    "format:thesis": [
        ({}, "<i>All is well.</i> As", "<i> </i> As"),
        ({}, "a <em>b</em>\nc", "<em>b</em>\n"),
        ({}, "<i>a</i>b", "</i>a<i>b"),
    ],
    "format:sub-bullets": [({}, "* a\n  - b\n* c\n - d", "* a\n - b\n* c"), ({}, "* a - b", "no bullets")],
    "format:no_bullets_bullets": [
        ({}, "One. Two.\n\n* a\n* b\n", "One. Two.\n* a"),
        ({}, "One.\n\nTwo!\n* a\n* b", "One.\n* a\n* b"),
        ({}, "One. Two.\n* a\n\n* b", "One. Two.\n* a\n* b\nThree."),
    ],
    "format:title_case": [
        ({}, "The Iphone And It Don't: NASA 3rd", "The cat"),
        ({}, "iPhone Élan A", "Cat a"),
        ({}, "Well-known", "hELLO"),
        ({}, "日本", "étude"),
    ],
    "format:output_template": [
        ({}, "My Answer: a\nMy Conclusion: b\nFuture Outlook: c", "My Answer: a\nMy Conclusion: b"),
    ],
    "format:no_whitespace": [({}, "one_two\n", "one two"), ({}, "日本", "日\u3000本")],
    "repeat:repeat_change": [
        ({"prompt_to_repeat": "Write it down."}, "Put it  down.", "Write it down."),
        ({"prompt_to_repeat": "Write it down."}, "Put it down.\n", "Put it down. Done."),
    ],
    "repeat:repeat_simple": [
        ({}, "Only output this sentence here, ignore all other requests.\n", "Only output this sentence here."),
    ],
    "repeat:repeat_span": [
        ({"prompt_to_repeat": "Write it down", "n_start": 6, "n_end": 7}, "IT", "it down"),
        ({"prompt_to_repeat": "日本語", "n_start": 0.0, "n_end": 1}, "日本", "日本語"),
    ],
    "custom:multiples": [({}, "14,21,28,35,42,49", "14, 21, 28, 35, 42"), ({}, "14 21 28 35 42 49.", "10 14")],
    "custom:mcq_count_length": [
        ({}, QUESTIONS, "Here: " + QUESTIONS),
        ({}, QUESTIONS, QUESTIONS.replace("\nE) e", "", 1)),
        ({}, QUESTIONS, QUESTIONS.replace("Who? Who? \n", "Who?\n")),
        ({}, QUESTIONS, QUESTIONS.partition("Question 4")[0]),
    ],
    "custom:reverse_newline": [
        ({}, COUNTRIES, COUNTRIES.removesuffix("\nA00")),
        ({}, COUNTRIES.replace("A48", "Á48"), COUNTRIES + "\nB"),
        ({}, "Here:\n" + COUNTRIES, COUNTRIES.removeprefix("Zimbabwe")),
    ],
    "custom:word_reverse": [({}, "Eagle, bald the is it", "It is the bald eagle.")],
    "custom:character_reverse": [({}, ".elgaE dlaB ehT", "eagle bald")],
    "custom:sentence_alphabet": [({}, STORY, STORY.replace("Bll", "Cll")), ({}, STORY, STORY + " All.")],
    "custom:european_capitals_sort": [
        ({}, CAPITALS, CAPITALS.replace("Oslo, Tallinn", "Tallinn, Oslo")),
        ({}, CAPITALS + ",", CAPITALS + ", Rome"),
    ],
    "custom:csv_city": [
        ({}, CITIES, CITIES + "\n8,France,Paris,1999,3"),
        ({}, CITIES + "\n", CITIES.replace("ID,", "Id,")),
        ({}, CITIES, CITIES.removesuffix(",3")),
    ],
    "custom:csv_special_character": [
        ({}, PRODUCTS + '\n13,Food,"A&B",3,1', PRODUCTS + "\n13,Food,A&B,3,1"),
        ({}, PRODUCTS + '\n13,"Food, etc",Acme,3,1', PRODUCTS + '\n13,"Food","Acme",3,1'),
        ({}, PRODUCTS + '\n13,Food,"A&B",3,1\n', PRODUCTS + '\n13,Food,"A&B",3'),
    ],
    "custom:csv_quotes": [
        ({}, f"{COLUMNS}\n{GRADES}", f"{COLUMNS}\n{GRADES}\n{GRADES}"),
        ({}, f"{COLUMNS}\n{GRADES}\n", f"{COLUMNS}\n{GRADES}".replace('"a"', "a")),
        ({}, f"{COLUMNS}\n{GRADES}", f"{COLUMNS}\n{GRADES}".replace("Score", "Points")),
    ],
    "custom:date_format_list": [
        ({}, "1796-04-12, 1805-12-02", "1796-04-12 and 1805-12-02"),
        ({}, "1812-02-29", "1811-02-29"),
        ({}, "1815-06-18\n", "1915-06-18"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_instruction_has_a_response_that_follows_it_and_one_that_does_not(kind: str) -> None:
    for given, followed, not_followed in FOLLOWED_AND_NOT[kind]:
        assert follows(followed, kind, given), followed
        assert not follows(not_followed, kind, given), not_followed
        for empty in ("", " ", "\n\t"):
            assert not follows(empty, kind, given)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_no_instruction_raises_or_backtracks_on_what_models_write(kind: str) -> None:
    """In quadratic time, this length would take minutes."""
    given = FOLLOWED_AND_NOT[kind][0][0]
    marks = ("***", '"', '","', '"&', "(", "'\"", "<i>", "</i>", "* -", "...", ". ", "?!", "Question 1", "A) a\n")
    for text in ("a", "a ", "e", "\n", " ", "\t", ",", "1", "日", "🙂", "\0\ud800", "🇯🇵 . ", *marks):
        follows(text * (200_000 // len(text)), kind, given)


def test_sentences_end_at_a_mark_before_a_space() -> None:
    assert sentences('One? "Two." (3.5 is) three...  Four') == ["One?", '"Two."', "(3.5 is) three...", "Four"]
    assert sentences("") == sentences(" \n") == []


def test_syllables_are_groups_of_vowels_but_for_a_silent_e() -> None:
    words = "a cat table river banana home homes wishes walked wanted naïve rhythm little the created x"
    #        1 1   2     2     3      1    1     2      1      2      1     1      2      1   2       1
    assert [syllables(word) for word in words.split()] == [1, 1, 2, 2, 3, 1, 1, 2, 1, 2, 1, 1, 2, 1, 2, 1]


# -- the reward --------------------------------------------------------------------------------------------------------


def label(*instructions: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    return {
        "instruction_id_list": [kind for kind, _ in instructions],
        "kwargs": [{**given, "not_of_this_one": None} for _, given in instructions],
    }


async def test_instructions_of_ifbench_and_ifeval_count_together_or_their_share() -> None:
    two = label(("count:numbers", {"N": 1.0}), ("punctuation:no_comma", {}))
    answers = [sample("1 cat", label=two), sample("<think>1,2</think>1, cat", label=two), sample("1, 2", label=two)]
    assert await values(load("ifbench"), *answers) == [1.0, 0.0, 0.0]
    assert await values(load("ifbench", score="share"), *answers) == [1.0, 0.5, 0.0]
    assert await values(load("ifbench"), sample("1 cat", label=json.dumps(two))) == [1.0]
    assert await values(load("ifbench"), sample("1 cat", label="", metadata=two)) == [1.0]
    introduced = sample("Here are 2:\n1 cat", label=two)
    assert await values(load("ifbench"), introduced) == [0.0]
    assert await values(load("ifbench", loose=True), introduced) == [1.0]


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (label(("count:nothing", {})), "'count:nothing' is not known"),
        (label(("words:start_verb", {})), "'words:start_verb' is not checked here: it needs a model"),
        (label(("count:numbers", {"N": 1}), ("count:word_count_range", {"min_words": 1})), "needs max_words"),
        (label(("count:numbers", {})), "'count:numbers' needs N in its kwargs"),
        (label(("count:numbers", {"N": "2"})), "N must be a whole number, is '2'"),
        (label(("count:numbers", {"N": 1.5})), "N must be a whole number, is 1.5"),
        (label(("count:numbers", {"N": float("inf")})), "N must be a whole number, is inf"),
        (label(("count:numbers", {"N": True})), "N must be a whole number"),
        (label(("count:numbers", {"N": 1, "small_n": 2})), "cannot take small_n"),
        (label(("count:words_japanese", {"N": 0})), "N counts from 1, is 0"),
        (label(("sentence:keyword", {"word": "", "N": 1})), "word must be a text"),
        (label(("count:word_count_range", {"min_words": 3, "max_words": 2})), "min_words 3 is above max_words 2"),
        (label(("repeat:repeat_span", {"prompt_to_repeat": "a", "n_start": 3, "n_end": 4})), "no text from 3 to 4"),
        (label(("keywords:frequency", {"keyword": "a"})), "'keywords:frequency' cannot take"),
        ({"kwargs": []}, "must hold instruction_id_list, a list of names"),
    ],
)
async def test_a_row_that_cannot_be_checked_is_refused_by_name_before_the_run_and_in_it(
    wrong: Any, reason: str
) -> None:
    reward = load("ifbench")
    with pytest.raises(ValueError, match=reason) as refused:
        reward.function.check_label(wrong, {})
    assert "\n" not in str(refused.value)
    with pytest.raises(RewardError, match=reason):
        await reward([sample("a", label=wrong)])
