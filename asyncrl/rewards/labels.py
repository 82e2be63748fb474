"""A label as the text that an answer is compared with. Shared by the rewards that compare text.

What is no answer is refused: a label that is missing, empty, a truth value or a table. Otherwise an answer that says
nothing would equal it, or no answer could. (tests/unit/rewards/test_labels.py)
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

import numpy as np


def label_forms(label: Any) -> tuple[str, ...]:
    """Return the texts of a label; an answer that is one of them is right. Raises ValueError.

    A column with gaps holds the number 5 as 5.0, so 5.0 is ("5", "5.0"). A list of one item is that item.
    """
    if isinstance(label, list | tuple) and len(label) == 1:
        label = label[0]
    if isinstance(label, list | tuple):
        raise ValueError(f"the label is a list of {len(label)}, and this reward compares with one answer")
    return _forms(label)


def label_texts(label: Any) -> list[str]:
    """Return the texts of a label for a reward that takes several right answers: those of each item of a list.

    Raises ValueError, also for an empty list.
    """
    items = list(label) if isinstance(label, list | tuple) else [label]
    if not items:
        raise ValueError("the label is an empty list: there is no label to compare to")
    return [form for item in items for form in _forms(item)]


def refuse_table(label: Any) -> None:
    """Raise ValueError for a table, of which one key is the label, such as verl's reward_model."""
    if isinstance(label, Mapping):
        names = ", ".join(map(str, label))[:60]
        key = "ground_truth" if "ground_truth" in label else "KEY"
        raise ValueError(f'the label is a table of {names}; name the key that holds it: label_key = "COLUMN.{key}"')


def _forms(label: Any) -> tuple[str, ...]:
    refuse_table(label)
    if label is None:
        raise ValueError("the prompt has no label to compare to")
    if isinstance(label, str):
        if not label.strip():
            raise ValueError(f"the label {label!r} is empty, like an answer that says nothing")
        return (label,)
    if isinstance(label, bool | np.bool_):
        raise ValueError(f'the label is the truth value {label}; write the text of a right answer, such as "yes"')
    if isinstance(label, numbers.Integral):
        return (str(label),)
    if isinstance(label, numbers.Real) and math.isfinite(label):
        number = float(label)
        return (str(int(number)), str(number)) if number.is_integer() else (str(number),)
    raise ValueError(f"the label must be text or a number, is {str(label)[:60]!r}")
