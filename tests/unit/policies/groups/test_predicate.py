"""The language that chooses recorded groups: comparisons over named fields, checked before anything is read."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.errors import ConfigError
from asyncrl.policies.groups.predicate import Predicate

FIELDS: dict[str, type] = {"task": str, "worker": str, "step": float, "reward": float}
GROUP = {"task": "gsm8k", "worker": "w3", "step": 401, "reward": -0.5}


def predicate(text: str) -> Predicate:
    return Predicate(text, fields=FIELDS, where="--where")


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ('task == "gsm8k" and step > 400', True),
        ('task == "gsm8k" and step > 401', False),
        ('worker in ("w3", "w4")', True),
        ('worker not in ["w3"]', False),
        ('"gsm" in task', True),
        ("not (400 < step <= 401) or reward >= -0.5", True),
        ("reward == -0.5 and step != 2", True),
        ("step in {1, 401}", True),
    ],
)
def test_a_predicate_holds_as_python_would_say(text: str, holds: bool) -> None:
    assert predicate(text)(GROUP) is holds
    assert predicate(text).may_hold(GROUP) is holds


@pytest.mark.parametrize(
    ("text", "known", "may_hold"),
    [
        ("step > 400", {"step": 7}, False),
        ('step > 400 and task == "gsm8k"', {"step": 7}, False),
        ('step > 400 and task == "gsm8k"', {"step": 500}, True),
        ('step > 400 or task == "gsm8k"', {"step": 7}, True),
        ('not task == "gsm8k"', {"step": 7}, True),
    ],
)
def test_what_is_not_known_of_a_group_may_be_so(text: str, known: dict[str, Any], may_hold: bool) -> None:
    assert predicate(text).may_hold(known) is may_hold


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("stpe > 4", "there is no field 'stpe'; did you mean step"),
        ("qqq > 4", "fields are reward, step, task, worker"),
        ('step > "400"', "compares a number with a text"),
        ("task == 4", "compares a number with a text"),
        ('worker in ("w3", 4)', "compares a number with a text"),
        ("step", "is no comparison"),
        ("step >", "write comparisons such as"),
        ("", "write comparisons such as"),
        ("step is 4", "compare with =="),
        ("task == None", "is neither a field, a number, nor a quoted text"),
        ('__import__("os").system("true") == 0', "is neither a field"),
        ("task.__class__ == 4", "is neither a field"),
        ("step > 9 ** 9 ** 9", "is neither a field"),
        ("(lambda: 1)() == 1", "is neither a field"),
        ("not " * 60 + "step > 1", "nested more than 50 deep"),
        ("(" * 300 + "step > 1" + ")" * 300, "write comparisons such as"),
        ("step > 1 or " * 300 + "step > 1", "at most 2,000 are allowed"),
        ("step > 1\x00", "write comparisons such as"),
    ],
)
def test_a_mistake_gets_one_line_that_says_what_is_meant(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        predicate(text)
    assert said in str(error.value) and "\n" not in str(error.value)
