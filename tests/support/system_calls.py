"""The system calls that change files below a folder, intercepted one by one, whatever code makes them.

Python's own modules (`pathlib`, `tempfile`, `shutil`) and the library reach the system through the functions of `os`
and through `open`. These are replaced for a while: every call that creates, writes, syncs, renames, links or removes
something below the folder goes through `perform`, which may record it, fail it, cut it short, or carry it out.
"""

import builtins
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock


@dataclass(frozen=True)
class SystemCall:
    """One call; paths are relative to the folder, and that of the folder itself is ".".

    `kind` is create, truncate, write, sync, close, chmod, rename, link, unlink, mkdir or rmdir.
    """

    kind: str
    path: str
    target: str = ""
    """The new name, of a rename or a link."""
    data: bytes = b""
    """What is written."""


Perform = Callable[[SystemCall, Callable[..., Any]], Any]
"""Carry out a call by calling the function, or do something else; a write's function takes the bytes to be written."""


@contextmanager
def intercepted(folder: Path, perform: Perform) -> Iterator[None]:
    """Let all calls that change something below a folder go through `perform`."""
    calls = Interception(folder, perform)
    replaced = {name: mock.patch.object(os, name, function) for name, function in calls.functions().items()}
    opens = [mock.patch.object(module, "open", calls.open_file) for module in (io, builtins)]
    with replaced_all([*replaced.values(), *opens]):
        yield


@contextmanager
def replaced_all(patches: list[Any]) -> Iterator[None]:
    """Apply patches, and take them back in reverse order."""
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in reversed(patches):
            patch.stop()


class Interception:
    """Functions in place of those of `os` and of `open`; `names` holds the paths of open files by their numbers."""

    def __init__(self, folder: Path, perform: Perform):
        self.folder, self.perform = os.path.abspath(folder), perform
        self.names: dict[int, str] = {}
        self.real = {name: vars(os)[name] for name in NAMES}
        self.real_open = builtins.open

    def functions(self) -> dict[str, Callable[..., Any]]:
        """The functions that replace those of `os`, by name."""
        one = {"unlink": "unlink", "remove": "unlink", "mkdir": "mkdir", "rmdir": "rmdir", "chmod": "chmod"}
        two = {"rename": "rename", "replace": "rename", "link": "link"}
        of_file = {"fsync": "sync", "close": "close"}
        return {
            "open": self.open,
            "write": self.write,
            **{name: self._on_path(name, kind) for name, kind in one.items()},
            **{name: self._on_paths(name, kind) for name, kind in two.items()},
            **{name: self._on_file(name, kind) for name, kind in of_file.items()},
        }

    def inside(self, path: Any, dir_fd: int | None = None) -> str | None:
        """The path relative to the folder; None outside it."""
        if isinstance(path, int):
            return self.names.get(path)
        text = os.fsdecode(path)
        if dir_fd is not None:
            if dir_fd not in self.names:
                return None
            text = os.path.join(self.folder, self.names[dir_fd], text)
        text = os.path.relpath(os.path.abspath(text), self.folder)
        return None if text == os.pardir or text.startswith(os.pardir + os.sep) else text

    def open(self, path, flags, mode=0o777, *, dir_fd=None):
        """Open a file by `os.open`."""

        def carry_out():
            return self.real["open"](path, flags, mode, dir_fd=dir_fd)

        name = self.inside(path, dir_fd)
        if name is None:
            return carry_out()
        call = opening(self.folder, name, bool(flags & os.O_CREAT), bool(flags & os.O_TRUNC))
        handle = carry_out() if call is None else self.perform(call, carry_out)
        self.names[handle] = name
        return handle

    def write(self, handle, data):
        """Write to a file by `os.write`."""
        name = self.names.get(handle)
        if name is None:
            return self.real["write"](handle, data)
        content = bytes(data)

        def carry_out(part=content):
            return self.real["write"](handle, part)

        return self.perform(SystemCall("write", name, data=content), carry_out)

    def open_file(self, file, mode="r", buffering=-1, encoding=None, errors=None, newline=None, **options):
        """Open a file by `open`; one that is written has a raw layer whose calls are intercepted."""
        name = self.inside(file) if isinstance(file, int | str | bytes | os.PathLike) else None
        if name is None or not set(mode) & set("wax+"):
            return self.real_open(file, mode, buffering, encoding, errors, newline, **options)
        kind = "".join(c for c in mode if c not in "bt")

        def carry_out():
            return InterceptedFile(self, name, file, kind, **options)

        call = None if isinstance(file, int) else opening(self.folder, name, "r" not in mode, "w" in mode)
        raw = carry_out() if call is None else self.perform(call, carry_out)
        self.names[raw.fileno()] = name
        buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding, errors, newline)

    def _on_path(self, name: str, kind: str) -> Callable[..., Any]:
        def function(path, *args, dir_fd=None, **options):
            def carry_out():
                return self.real[name](path, *args, **({} if dir_fd is None else {"dir_fd": dir_fd}), **options)

            where = self.inside(path, dir_fd)
            return carry_out() if where is None else self.perform(SystemCall(kind, where), carry_out)

        return function

    def _on_paths(self, name: str, kind: str) -> Callable[..., Any]:
        def function(old, new, **options):
            def carry_out():
                return self.real[name](old, new, **options)

            where, target = self.inside(old), self.inside(new)
            if where is None or target is None:
                return carry_out()
            return self.perform(SystemCall(kind, where, target), carry_out)

        return function

    def _on_file(self, name: str, kind: str) -> Callable[..., Any]:
        def function(handle):
            number = handle if isinstance(handle, int) else handle.fileno()

            def carry_out():
                return self.real[name](number)

            if number not in self.names:
                return carry_out()
            where = self.names.pop(number) if kind == "close" else self.names[number]
            return self.perform(SystemCall(kind, where), carry_out)

        return function


class InterceptedFile(io.FileIO):
    """A file whose writes and whose end are intercepted."""

    def __init__(self, calls: Interception, name: str, file: Any, mode: str, **options: Any):
        super().__init__(file, mode, **options)
        self._calls, self._name = calls, name

    def write(self, data):
        content = bytes(data)

        def carry_out(part=content):
            return io.FileIO.write(self, part)

        return self._calls.perform(SystemCall("write", self._name, data=content), carry_out)

    def close(self):
        if self.closed:
            return
        self._calls.names.pop(self.fileno(), None)
        try:
            self._calls.perform(SystemCall("close", self._name), lambda: None)
        finally:
            super().close()


NAMES = ("open", "write", "fsync", "close", "unlink", "remove", "mkdir", "rmdir", "chmod", "rename", "replace", "link")
"""The functions of `os` that are replaced."""


def opening(folder: str, name: str, creates: bool, truncates: bool) -> SystemCall | None:
    """The change that opening a file makes, if it makes one."""
    there = os.path.lexists(os.path.join(folder, name))
    if there and truncates:
        return SystemCall("truncate", name)
    return SystemCall("create", name) if creates and not there else None
