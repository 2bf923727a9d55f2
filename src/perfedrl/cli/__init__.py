"""The command line of perfedrl, with one module for each group of commands."""

import ast
import sys
from contextlib import nullcontext
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from perfedrl.cli.console import exit_stopped, handled, out, print_message
from perfedrl.cli.stop_signal import INTERRUPTED, STOP
from perfedrl.errors import UserError
from perfedrl.own_modules import find_modules_in

COMMANDS = {
    "demo": "studies",
    "check": "check",
    "inspect": "runs",
    "diagnose": "diagnose",
    "train": "runs",
    "evaluate": "runs",
    "personalize": "personalize",
    "theory": "theory",
    "estimators": "estimators",
    "compare": "compare",
    "reproduce": "studies",
    "list": "runs",
    "agent": "agent",
}
"""Commands in the order of the help text -> the module that has a function of their name."""
NETWORK = "federation"
SERVICES = (NETWORK, "agent")
"""Commands that handle signals and print warnings themselves."""


def application(command: str | None = None) -> typer.Typer:
    """Make the application with all commands; if one is given, others appear in the help text only.

    Most of a command's start is spent on imports: only the module of the given command is imported.
    """
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
    for name, module in COMMANDS.items():
        function = "list_" if name == "list" else name
        if command in (name, None):
            app.command(name)(vars(import_module(f"perfedrl.cli.{module}"))[function])
        else:
            app.command(name, help=summary(module, function))(not_imported)
    from perfedrl.cli import federation

    app.add_typer(federation.app, name=NETWORK)
    return app


def not_imported() -> None:
    """Stand for a command that was not given."""


def summary(module: str, function: str) -> str:
    """The first paragraph of a command's docstring, read from its source, since importing it takes seconds."""
    source = ast.parse((Path(__file__).parent / f"{module}.py").read_text(encoding="utf-8"))
    functions = {node.name: node for node in source.body if isinstance(node, ast.FunctionDef)}
    return (ast.get_docstring(functions[function]) or "").partition("\n\n")[0]


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
    command = "".join(sys.argv[1:2])
    try:
        with nullcontext() if command in SERVICES else handled():
            # Typer returns the code of an Exit, and 130 after a KeyboardInterrupt.
            code = application(command)(standalone_mode=False)
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
        if said:  # without a command the help text was printed already
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
