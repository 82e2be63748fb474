"""How long an actor may be silent or wait before it counts as a fault, and which text may be shown."""

from __future__ import annotations

import pytest

from asyncrl.logs import printable_text
from asyncrl.policies.health.waits import stall_limit


def test_stall_limit_is_four_times_the_median_and_at_least_six_seconds() -> None:
    assert stall_limit(0.5, first=25) == 6
    assert stall_limit(5, first=25) == 20
    assert stall_limit(0, first=25) == 25


@pytest.mark.parametrize(
    "text",
    ["全角\u3000空白", "prix\xa0: 12\u202f000 €", "می\u200cخواهم", "👩\u200d👩\u200d👧", "soft\xadhy", "a\tb\nc"],
)
def test_shows_spaces_and_joiners_of_any_script(text: str) -> None:
    assert printable_text(text) == text


@pytest.mark.parametrize("letter", ["\x1b", "\r", "\x7f", "\x9b", "\u2028", "\u2029", "\ud800", "\u202e", "\u2066"])
def test_hides_characters_that_control_a_terminal_or_reorder_text(letter: str) -> None:
    assert printable_text(f"a{letter}b") == "a?b"
