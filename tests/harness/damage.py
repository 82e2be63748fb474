"""Damages files of a run's folder as disks, people and programs do, from a seed."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

HUGE_BYTES: Final = 3 * 2**20


def cut(path: Path, dice: random.Random) -> None:
    os.truncate(path, dice.randrange(max(1, path.stat().st_size)))


def flip(path: Path, dice: random.Random) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(min(len(data), dice.choice([1, 1, 8, 64]))):
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    path.write_bytes(data)


def remove(path: Path, dice: random.Random) -> None:
    path.unlink()


def put_a_folder(path: Path, dice: random.Random) -> None:
    path.unlink()
    path.mkdir()
    if dice.random() < 0.5:
        (path / "inside").write_text("{}")


def make_unreadable(path: Path, dice: random.Random) -> None:
    path.chmod(0)  # no effect for root


def loop(path: Path, dice: random.Random) -> None:
    path.unlink()
    path.symlink_to(path.name)


def dangle(path: Path, dice: random.Random) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def huge_line(path: Path, dice: random.Random) -> None:
    data = path.read_bytes()
    at = dice.randrange(len(data) + 1)
    path.write_bytes(data[:at] + dice.choice([b"x", b"[", b"9", b" "]) * HUGE_BYTES + data[at:])


def nul_bytes(path: Path, dice: random.Random) -> None:
    data = bytearray(path.read_bytes())
    at = dice.randrange(len(data) + 1)
    end = min(len(data), at + dice.choice([1, 100, 4096]))
    data[at:end] = bytes(end - at)
    path.write_bytes(data)


def other_encoding(path: Path, dice: random.Random) -> None:
    text = path.read_bytes().decode("latin1")
    path.write_bytes(text.encode(dice.choice(["utf-16", "utf-32", "utf-8-sig"]), errors="replace"))


def other_content(path: Path, dice: random.Random) -> None:
    """Replace one line by valid JSON of another shape."""
    values = [
        "null",
        "[]",
        "{}",
        "3",
        '"x"',
        "1e999",
        "NaN",
        "-1",
        '{"step": "a"}',
        '{"kind": []}',
        "[" * 99 + "]" * 99,
    ]
    lines = path.read_bytes().split(b"\n")
    lines[dice.randrange(len(lines))] = dice.choice(values).encode()
    path.write_bytes(b"\n".join(lines))


def other_value(path: Path, dice: random.Random) -> None:
    """Replace one number, text or list by a value that is usually of another type."""
    pieces = path.read_bytes().split(b": ")
    if len(pieces) < 2:
        return
    at = dice.randrange(1, len(pieces))
    rest = pieces[at]
    end = min((rest.find(mark) for mark in (b",", b"}", b"]") if mark in rest), default=len(rest))
    value = dice.choice([b"null", b"-1", b'"7"', b"[1]", b"{}", b"1e400", b"NaN", b"0.5", b"true", b"9" * 30])
    pieces[at] = value + rest[end:]
    path.write_bytes(b": ".join(pieces))


def twice(path: Path, dice: random.Random) -> None:
    path.write_bytes(path.read_bytes() * 2)


def swap(path: Path, dice: random.Random) -> None:
    """Replace the file by another file of the folder."""
    others = sorted(other for other in path.parent.iterdir() if other.is_file() and other != path)
    if others:
        shutil.copyfile(dice.choice(others), path)


KINDS: Final[tuple[Callable[[Path, random.Random], Any], ...]] = (
    *(cut, flip, remove, put_a_folder, make_unreadable, loop, dangle, huge_line, nul_bytes, other_encoding),
    *(other_content, other_value, other_value, twice, swap),
)


def spoil(folder: Path, seed: int) -> list[str]:
    """Damage one to three files below ``folder``. Return what was done to which file."""
    dice = random.Random(seed)
    done = []
    for _ in range(dice.randrange(1, 4)):
        files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
        kind = dice.choice(KINDS)
        top = [path for path in files if path.parent == folder]
        path = dice.choice(top if top and dice.random() < 0.6 else files)
        kind(path, dice)
        done.append(f"{kind.__name__} {path.relative_to(folder)}")
    return done
