"""Records as version spans which weights sampled which tokens of an answer."""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncrl.messages import VersionSpan

Version = tuple[int, int]
"""(incarnation, policy_version)."""


@dataclass(slots=True)
class SpanRecorder:
    """``mark`` sets the version that samples from token ``start`` on; the last mark at a position wins."""

    marks: list[tuple[int, Version]] = field(default_factory=list)

    def mark(self, start: int, version: Version) -> None:
        while self.marks and self.marks[-1][0] >= start:
            self.marks.pop()
        if not self.marks or self.marks[-1][1] != version:
            self.marks.append((start, version))

    def spans(self, num_tokens: int, *, begin: int = 0) -> tuple[VersionSpan, ...]:
        """Return the spans of tokens ``begin`` to ``num_tokens``, with positions relative to ``begin``."""
        marks = {max(0, start - begin): version for start, version in self.marks}  # the last one at 0 wins
        return tuple(
            VersionSpan(start=start, incarnation=version[0], policy_version=version[1])
            for start, version in marks.items()
            if start < num_tokens - begin
        )


def format_version(version: Version) -> str:
    """Return the version as text: "0:12" is incarnation 0, policy version 12."""
    return f"{version[0]}:{version[1]}"
