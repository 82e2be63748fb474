"""The table of faults gives the health monitor's remedies in its own words."""

from __future__ import annotations

import re

from asyncrl.policies.groups.overdue import KEPT
from asyncrl.policies.health import circles, faults
from asyncrl.policies.health.conditions import CONDITIONS
from tests import ROOT

PAGE = ROOT / "docs" / "guides" / "troubleshooting.md"


def remedies() -> dict[str, str]:
    """Return the remedy of every fault whose remedy names no process."""
    seen = faults.Observation(actors={}, listened=0.0)
    found = [faults.deaf(seen), faults.refused(seen), ended := circles.ended(1.0, "", 0)]
    found.append(circles.unanswered(ended, {KEPT: 2.0}))
    found += [faults.nobody(role, 1.0) for role in faults.MISSING]
    return (
        {part.fault: part.remedy for part in faults.PARTS.values() if part.remedy}
        | {name: remedy for name, (_, remedy, _) in circles.CIRCLES.items()}
        | {one.fault: one.remedy for one in found}
    )


def test_the_table_of_faults_has_the_remedies_of_the_code() -> None:
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    table = {row[0].strip("`"): row[3].replace("`", "") for row in rows}
    expected = remedies()
    assert {fault: table.get(fault) for fault in expected} == expected


def test_table_of_faults_names_every_fault() -> None:
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    named = {name.strip("`") for row in rows for name in row[0].split(", ")}
    texts = [path.read_text() for path in (ROOT / "asyncrl" / "policies" / "health").glob("*.py")]
    said = {name for text in texts for name in re.findall(r'fault="([a-z ]+)"', text)}
    said |= {*circles.CIRCLES, *(one.fault for one in CONDITIONS.values())}
    said |= {part.fault for name, part in faults.PARTS.items() if name != "data"}
    said |= {fault for fault, *_ in faults.MISSING.values()}
    assert said <= named, said - named
