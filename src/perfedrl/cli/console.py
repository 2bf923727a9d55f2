"""Shared by all commands: options, messages, progress, and the exit after Ctrl-C."""

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

RunsFolder = Annotated[Path, typer.Option("--runs", help="Folder for runs, one folder each.")]
Restart = Annotated[
    bool, typer.Option("--restart", help="Train again from the first round, also finished and interrupted runs.")
]
Chunk = Annotated[
    int | None,
    typer.Option(help="Number of agents that run at a time, for fleets that exceed memory; results do not change."),
]
Cache = Annotated[
    bool,
    typer.Option(
        "--compile-cache/--no-compile-cache", help="Cache compiled programs on disk, so that the next start is faster."
    ),
]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Also write the table to this JSON file.")]
ReportFile = Annotated[
    Path | None, typer.Option("--report", help="Also write a report to this .html file: one page, opens offline.")
]


@contextmanager
def training(restart: bool) -> Iterator[Any]:
    """Show a progress bar for each group of runs that train together; after Ctrl-C, say how to continue."""
    from perfedrl.cli.progress import progress_bars  # imports JAX, which not every command needs
    from perfedrl.experiments.training import Interrupted

    try:
        with progress_bars(err) as bars, print_warnings():
            yield [bars]
    except Interrupted as stop:
        same = "the same command without --restart" if restart else "the same command"
        print_message(f"{stop}; run {same} to go on from there", "yellow")
        exit_immediately()


@contextmanager
def print_warnings() -> Iterator[None]:
    """Print the library's warnings, for example that a round goes on without an agent."""

    class Printer(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            print_message(record.getMessage(), "yellow")

    log, handler = logging.getLogger("perfedrl"), Printer()
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


@contextmanager
def status_line(what: str) -> Iterator[Any]:
    """Show a line with the current step of a measurement; the context's value sets the step."""
    with err.status(f"{what} ...") as status:
        yield lambda part: status.update(f"{what}: {part} ...")


def command_line() -> str:
    """The current command as the user typed it."""
    return shlex.join(["perfedrl", *sys.argv[1:]])


def print_written(paths: Sequence[Path]) -> None:
    """Print the paths of files that were written."""
    out.print("wrote " + ", ".join(map(str, paths)), highlight=False, soft_wrap=True)


def as_json(content: Any) -> bytes:
    """Encode content as JSON; infinities and NaN, such as the open end of an interval, become null."""

    def finite(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: finite(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [finite(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return (json.dumps(finite(content), indent=2, allow_nan=False) + "\n").encode()


def print_message(message: str, style: str | None = None) -> None:
    """Print a message to standard error, without interpreting brackets as markup."""
    err.print(message, style=style, highlight=False, markup=False, soft_wrap=True)


def exit_immediately() -> NoReturn:
    """Exit without clean-up, since JAX crashes if it is torn down while another thread compiles."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(INTERRUPTED)
