"""Which weights sampled which token of one answer: a list of marks that becomes version spans."""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncrl.messages import VersionSpan

Version = tuple[int, int]
"""(run_epoch, policy_version)."""


@dataclass(slots=True)
class SpanRecorder:
    """Grows with an answer: ``mark`` says which version samples from token ``start`` on; the last one there wins."""

    marks: list[tuple[int, Version]] = field(default_factory=list)

    def mark(self, start: int, version: Version) -> None:
        while self.marks and self.marks[-1][0] >= start:
            self.marks.pop()
        if not self.marks or self.marks[-1][1] != version:
            self.marks.append((start, version))

    def spans(self, num_tokens: int, *, begin: int = 0) -> tuple[VersionSpan, ...]:
        """Of tokens ``begin`` to ``num_tokens``, counted from ``begin``."""
        marks = {max(0, start - begin): version for start, version in self.marks}  # of several at 0 the last
        return tuple(
            VersionSpan(start=start, run_epoch=version[0], policy_version=version[1])
            for start, version in marks.items()
            if start < num_tokens - begin
        )


def format_version(version: Version) -> str:
    """The version as an engine server carries it: "0:12" is run epoch 0, policy version 12."""
    return f"{version[0]}:{version[1]}"


def parse_version(text: str, *, default: Version) -> Version:
    """``default`` when the text is no version of ours, such as the "default" of a server nobody has loaded yet."""
    epoch, colon, version = text.partition(":")
    if colon and epoch.isdecimal() and version.isdecimal():
        return int(epoch), int(version)
    return default
