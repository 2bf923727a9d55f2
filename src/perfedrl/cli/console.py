"""What all commands share: printing, progress bars, and how a command ends."""

import json
import logging
import math
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

out, err = Console(), Console(stderr=True)
INTERRUPTED = 130
"""The exit code after Ctrl-C."""

RunsFolder = Annotated[Path, typer.Option("--runs", help="Where runs are kept.")]
Restart = Annotated[bool, typer.Option("--restart", help="Train again what is already there or half done.")]
Chunk = Annotated[int | None, typer.Option(help="Agents that run at a time, for fleets that exceed memory.")]
Cache = Annotated[bool, typer.Option("--compile-cache/--no-compile-cache", help="Keep compiled programs on disk.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Also write the table to this file.")]
ReportFile = Annotated[
    Path | None, typer.Option("--report", help="Also write a report to this .html file: one page, opens offline.")
]


@contextmanager
def training(restart: bool) -> Iterator[Any]:
    """A progress bar per group of runs that train together; Ctrl-C ends with how to go on."""
    from perfedrl.cli.progress import progress_bars  # loads JAX, which not every command needs
    from perfedrl.experiments.training import Interrupted

    try:
        with progress_bars(err) as bars, spoken_warnings():
            yield [bars]
    except Interrupted as stop:
        same = "the same command without --restart" if restart else "the same command"
        say(f"{stop}; run {same} to go on from there", "yellow")
        leave_at_once()


@contextmanager
def spoken_warnings() -> Iterator[None]:
    """What the library warns of while it works, an agent that had to sit out a round, say, as sentences."""

    class Spoken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            say(record.getMessage(), "yellow")

    log, handler = logging.getLogger("perfedrl"), Spoken()
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


@contextmanager
def measuring(what: str) -> Iterator[Any]:
    """A line that says what is measured now, for work that trains nothing."""
    with err.status(f"{what} ...") as status:
        yield lambda part: status.update(f"{what}: {part} ...")


def command_line() -> str:
    """The command that runs now, as one would type it."""
    return shlex.join(["perfedrl", *sys.argv[1:]])


def wrote(paths: Sequence[Path]) -> None:
    out.print("wrote " + ", ".join(map(str, paths)), highlight=False, soft_wrap=True)


def as_json(content: Any) -> bytes:
    """Content as JSON; what JSON has no word for, such as the open end of an interval, is null."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return (json.dumps(plain(content), indent=2, allow_nan=False) + "\n").encode()


def say(message: str, style: str | None = None) -> None:
    """Print a sentence to the error output, as it is: brackets in it are no markup."""
    err.print(message, style=style, highlight=False, markup=False, soft_wrap=True)


def leave_at_once() -> NoReturn:
    """End the process without tidying up: JAX crashes when it is torn down while it compiles in another thread."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(INTERRUPTED)
