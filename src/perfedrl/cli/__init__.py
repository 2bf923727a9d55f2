"""The command line of perfedrl, with one module for each group of commands."""

import sys
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from perfedrl.cli.console import exit_stopped, handled, out, print_message
from perfedrl.cli.stop_signal import INTERRUPTED, STOP
from perfedrl.errors import UserError
from perfedrl.own_modules import find_modules_in

NETWORK = "federation"
SERVICES = (NETWORK, "agent")
"""Commands that handle signals and print warnings themselves."""


def application(group: str | None = None) -> typer.Typer:
    """Make the application with all commands, or with the group `federation` only, which does not import JAX."""
    app = typer.Typer(
        help="Personalized federated reinforcement learning: agents learn a shared initialization together, and each "
        "agent adapts it to its own task by one or few local policy-gradient steps.\n\n"
        "Start with `perfedrl demo`. For your own fleet: `perfedrl check ENVIRONMENT` plays a Gymnasium environment "
        "and says what is wrong with it, `perfedrl inspect CONFIG` shows a fleet's agents, `perfedrl diagnose CONFIG` "
        "tells whether they need policies of their own, `perfedrl train CONFIG` trains them, "
        "and `perfedrl evaluate RUN` and `perfedrl personalize RUN` use the trained run.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(options)
    if group != NETWORK:
        from perfedrl.cli import agent, check, compare, diagnose, estimators, personalize, runs, studies, theory

        app.command()(studies.demo)
        app.command()(check.check)
        app.command()(runs.inspect)
        app.command()(diagnose.diagnose)
        app.command()(runs.train)
        app.command()(runs.evaluate)
        app.command()(personalize.personalize)
        app.command()(theory.theory)
        app.command()(estimators.estimators)
        app.command()(compare.compare)
        app.command()(studies.reproduce)
        app.command(name="list")(runs.list_)
        app.command()(agent.agent)
    from perfedrl.cli import federation

    app.add_typer(federation.app, name=NETWORK)
    return app


def print_version(asked: bool) -> bool:
    """Print the version of perfedrl and end, if asked."""
    if asked:
        out.print(f"perfedrl {version('perfedrl')}", highlight=False)
        raise typer.Exit
    return asked


def options(
    show_version: Annotated[
        bool | None, typer.Option("--version", callback=print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """The options of `perfedrl` itself, without a command."""


def main() -> None:
    """Run a command; a user's mistake is reported in one sentence, with exit code 2."""
    find_modules_in(Path.cwd())
    command = sys.argv[1:2]
    try:
        with nullcontext() if command and command[0] in SERVICES else handled():
            # Typer returns the code of an Exit, and 130 after a KeyboardInterrupt.
            code = application(*command)(standalone_mode=False)
        if code == INTERRUPTED:
            raise KeyboardInterrupt
        sys.exit(code)
    except (KeyboardInterrupt, typer.Abort):
        exit_stopped("stopped")
    except Exception as error:
        if STOP.received is not None:  # the exception of a signal may become another one, as in an import
            exit_stopped("stopped")
        said = in_one_sentence(error)
        if said is None:
            raise
        print_message(f"error: {said}", "red")
        sys.exit(2)


def in_one_sentence(error: Exception) -> str | None:
    """The message for an error that a user can cause; None for a defect of the program."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, MemoryError):
        return f"not enough memory: {error}; lower the batches, the horizon or the policy's size"
    if isinstance(error, OSError):
        return f"{error.filename or 'the system'}: {error.strerror or error}"
    if hasattr(error, "format_message"):  # errors of the parser, such as an unknown option
        return error.format_message()
    return None
