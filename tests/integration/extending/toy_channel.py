"""A custom weight channel: folders, with a note in each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from asyncrl.messages import WeightVersion
from asyncrl.tensors.snapshot import Snapshot
from asyncrl.weights.files import FilesChannel


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    note: str = ""


class NotedChannel(FilesChannel):
    """weights.channel = "tests.integration.extending.toy_channel:NotedChannel" """

    options_type = Options

    def __init__(self, directory: Path, *, keep: int, model_path: Path, options: Options) -> None:
        super().__init__(directory, keep=keep, model_path=model_path)
        self._note = options.note

    def publish(self, snapshot: Snapshot, *, incarnation: int, policy_version: int) -> WeightVersion:
        version = super().publish(snapshot, incarnation=incarnation, policy_version=policy_version)
        (Path(version.uri) / "note").write_text(self._note)
        return version
