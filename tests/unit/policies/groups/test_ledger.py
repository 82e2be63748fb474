"""A ledger records which numbers are done."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.policies.groups.ledger import Ledger


@given(st.lists(st.integers(0, 40)))
def test_a_ledger_holds_what_was_added_and_survives_json(numbers: list[int]) -> None:
    ledger = Ledger()
    for number in numbers:
        ledger.add(number)
    again = Ledger.from_json(ledger.as_json())
    assert {n for n in range(50) if n in again} == set(numbers)
    assert len(again) == len(set(numbers))
    assert again.watermark not in again.beyond


def test_a_ledger_of_contiguous_numbers_is_one_number() -> None:
    ledger = Ledger()
    for number in (2, 0, 1):
        assert ledger.add(number)
    assert ledger.as_json() == {"watermark": 3, "beyond": []}
    assert not ledger.add(1)
