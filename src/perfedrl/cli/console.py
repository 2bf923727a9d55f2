"""Shared by all commands: options, messages, progress, and the exit after Ctrl-C or SIGTERM."""

import json
import logging
import math
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from perfedrl.cli.stop_signal import STOP

# Without emoji: rich would print a robot for ":robot:", and names of environments have colons.
out, err = Console(emoji=False), Console(stderr=True, emoji=False)

RunsFolder = Annotated[Path, typer.Option("--runs", help="Folder for runs, one folder each.")]
Restart = Annotated[
    bool, typer.Option("--restart", help="Train again from the first round, also finished and interrupted runs.")
]
Trust = Annotated[
    bool,
    typer.Option("--trust", help="Run the code that a run names, although you did not train it on this machine."),
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
    """Show the progress of runs, by groups that train together; after Ctrl-C or SIGTERM, say how to continue."""
    # These import JAX, which not every command needs.
    from perfedrl.cli.stop_between_rounds import StopBetweenRounds
    from perfedrl.experiments.training import Interrupted
    from perfedrl.simulation.progress import show_progress

    try:
        STOP.check()
        with show_progress(err) as shown:
            yield [StopBetweenRounds(), shown]
    except Interrupted as stop:
        exit_stopped(f"{stop}; run {same_command(restart)} to go on from there")
    except KeyboardInterrupt:
        exit_stopped(f"stopped; what was saved before is kept, and {same_command(restart)} does the rest")


def print_warning(message: str) -> None:
    """Print a warning to standard error."""
    print_message(message, "yellow")


@contextmanager
def handled() -> Iterator[None]:
    """Stop on Ctrl-C and SIGTERM, and print the library's warnings."""
    with STOP.handled(), print_warnings():
        yield


@contextmanager
def print_warnings(tell: Callable[[str], None] = print_warning) -> Iterator[None]:
    """Print the library's warnings, for example that a round goes on without an agent, or pass them to `tell`."""

    class Printer(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            tell(record.getMessage())

    log, handler = logging.getLogger("perfedrl"), Printer()
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


@contextmanager
def status_line(what: str) -> Iterator[Any]:
    """Show the current step of a measurement, on plain lines where there is no terminal; the value sets the step."""
    with err.status(f"{what} ...") if err.is_terminal else nullcontext() as status:
        show = print_message if status is None else status.update

        def step(part: str) -> None:
            STOP.check()
            show(f"{what}: {part} ...")

        yield step


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


def same_command(restart: bool) -> str:
    """The command that goes on with a stopped one, in words."""
    return "the same command without --restart" if restart else "the same command"


def exit_stopped(sentence: str) -> NoReturn:
    """Say where a command was stopped by Ctrl-C or SIGTERM, and exit."""
    print_message(f"{STOP.prefix}{sentence}", "yellow")
    exit_immediately()


def exit_immediately() -> NoReturn:
    """Exit without clean-up, since JAX crashes if it is torn down while another thread compiles."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(STOP.exit_code)
