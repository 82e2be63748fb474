"""The command in this process."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.cli import main as cli


def asyncrl(*arguments: Any, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of the command."""
    code = cli.main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err
