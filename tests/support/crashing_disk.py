"""A disk as a power cut sees it: what is safe, what is not, and all that may be left.

A file's content is safe after the file is synced, and a name (of a new, renamed, linked or removed file or folder)
after the folder that holds it is synced. A power cut loses any subset of the names that are not safe, in any
combination, and of each file that is not safe it leaves the old content, the new one, the first half of it, or zeros.
That is more than a journaling file system loses, which keeps the order of changes. A single rename is atomic.
"""

import itertools
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from system_calls import SystemCall

ROOT = 0
TEMPORARY = re.compile(r"\..+\.[a-z0-9_]{8}")
"""Names that `tempfile` draws at random, which nothing reads again: disks that differ in these alone are alike."""

Place = tuple[int, str]
"""A folder's number and a name in it."""


@dataclass(frozen=True)
class Change:
    """A change of names that happens as a whole, and is safe once one of its folders is synced."""

    names: tuple[tuple[Place, int | None], ...]

    @property
    def folders(self) -> set[int]:
        """The folders that hold the names."""
        return {folder for (folder, _), _ in self.names}


@dataclass(frozen=True)
class Disk:
    """The files and folders of one machine: what programs see, and what is safe."""

    names: dict[Place, int] = field(default_factory=dict)
    safe_names: dict[Place, int] = field(default_factory=dict)
    unsafe: tuple[Change, ...] = ()
    content: dict[int, bytes | None] = field(default_factory=lambda: {ROOT: None})
    """By number; None is a folder."""
    safe_content: dict[int, bytes | None] = field(default_factory=lambda: {ROOT: None})

    def after(self, call: SystemCall) -> "Disk":
        """The disk after a call."""
        match call.kind:
            case "create" | "mkdir":
                number, new = max(self.content) + 1, b"" if call.kind == "create" else None
                made = replace(self, content={**self.content, number: new})
                made = replace(made, safe_content={**self.safe_content, number: new})
                return made._renamed(((self.place(call.path), number),))
            case "truncate":
                return replace(self, content={**self.content, self.number(call.path): b""})
            case "write":
                number = self.number(call.path)
                return replace(self, content={**self.content, number: self.content[number] + call.data})
            case "rename":
                number, target = self.number(call.path), self.place(call.target)
                if self.names.get(target) == number:  # two names of one file, which stay as they are
                    return self
                return self._renamed(((self.place(call.path), None), (target, number)))
            case "link":
                return self._renamed(((self.place(call.target), self.number(call.path)),))
            case "unlink" | "rmdir":
                return self._renamed(((self.place(call.path), None),))
            case "sync":
                return self._synced(self.number(call.path))
        assert call.kind in ("chmod", "close"), call
        return self

    def _renamed(self, names: tuple[tuple[Place, int | None], ...]) -> "Disk":
        change = Change(names)
        return replace(self, names=applied(self.names, change), unsafe=(*self.unsafe, change))

    def _synced(self, number: int) -> "Disk":
        if self.content[number] is not None:
            return replace(self, safe_content={**self.safe_content, number: self.content[number]})
        names, rest = self.safe_names, []
        for change in self.unsafe:
            if number in change.folders:
                names = applied(names, change)
            else:
                rest.append(change)
        return replace(self, safe_names=names, unsafe=tuple(rest))

    def place(self, path: str) -> Place:
        """The folder's number and the name of a path."""
        folder, name = os.path.split(path)
        return self.number(folder), name

    def number(self, path: str) -> int:
        """The number of the file or folder at a path."""
        found = ROOT
        for name in Path(path).parts:
            found = self.names[found, name]
        return found

    def after_power_cut(self) -> Iterator["Disk"]:
        """All disks that a power cut may leave; on each of them everything is safe."""
        for kept in itertools.product((False, True), repeat=len(self.unsafe)):
            names = self.safe_names
            for change in itertools.compress(self.unsafe, kept):
                names = applied(names, change)
            found = set(reachable(names))
            choices = {x: contents(self.safe_content[x], self.content[x]) for x in found}
            for content in itertools.product(*choices.values()):
                yield settled(names, dict(zip(choices, content, strict=True)))

    @cached_property
    def files(self) -> dict[str, bytes | None]:
        """What programs see: contents by path; None is a folder."""
        return {path: self.content[number] for number, path in paths(self.names)}

    @cached_property
    def key(self) -> Any:
        """A value that is equal for disks on which programs, and power cuts, find the same."""
        if self.unsafe or any(self.content[x] != self.safe_content[x] for x in reachable(self.names)):
            return seen(self), frozenset(map(seen, self.after_power_cut()))
        return seen(self)

    def put_into(self, folder: Path) -> None:
        """Make a real folder what programs see."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        first: dict[int, Path] = {}
        for number, path in paths(self.names):
            content = self.content[number]
            if content is None:
                (folder / path).mkdir()
            elif number in first:
                os.link(first[number], folder / path)
            else:
                (folder / path).write_bytes(content)
                first[number] = folder / path


def settled(names: dict[Place, int], content: dict[int, bytes | None]) -> Disk:
    """A disk on which everything is safe."""
    content = {ROOT: None, **content}
    names = {place: number for place, number in names.items() if place[0] in content and number in content}
    return Disk(names, names, (), content, content)


def applied(names: dict[Place, int], change: Change) -> dict[Place, int]:
    """Names after a change."""
    changed = dict(names)
    for place, number in change.names:
        if number is None:
            changed.pop(place, None)
        else:
            changed[place] = number
    return changed


def contents(safe: bytes | None, now: bytes | None) -> list[bytes | None]:
    """All contents that a power cut may leave of a file."""
    if now is None or now == safe:
        return [now]
    return list(dict.fromkeys((safe, now, now[: len(now) // 2], bytes(len(now)))))


def paths(names: dict[Place, int], folder: int = ROOT, prefix: str = "") -> Iterator[tuple[int, str]]:
    """Numbers and paths of all files and folders, each folder before what it holds."""
    for (parent, name), number in sorted(names.items()):
        if parent == folder:
            path = f"{prefix}{name}"
            yield number, path
            yield from paths(names, number, f"{path}/")


def reachable(names: dict[Place, int]) -> set[int]:
    """The numbers of files and folders that have a path."""
    return {number for number, _ in paths(names)}


def seen(disk: Disk) -> Any:
    """What programs see, as a value: contents by path without temporary names, and which paths are the same file."""
    found: dict[int, list[str]] = {}
    for number, path in paths(disk.names):
        if not TEMPORARY.fullmatch(os.path.basename(path)):
            found.setdefault(number, []).append(path)
    return frozenset((tuple(names), canonical(disk.content[number])) for number, names in found.items())


@cache
def canonical(content: bytes | None) -> Any:
    """A file's content; of a safetensors file, whose header is in any order, the header in one order."""
    if content is None or len(content) < 8:
        return content
    end = 8 + int.from_bytes(content[:8], "little")
    try:
        return json.dumps(json.loads(content[8:end]), sort_keys=True), content[end:]
    except (ValueError, OverflowError):
        return content
