"""The command line of perfedrl, with one module for each group of commands."""

import os
import sys

import typer

from perfedrl.cli.console import INTERRUPTED, exit_immediately, print_message
from perfedrl.errors import UserError

NETWORK = "federation"


def application(group: str | None = None) -> typer.Typer:
    """Make the application with all commands, or with the group `federation` only, which does not import JAX."""
    app = typer.Typer(
        help="Personalized federated reinforcement learning: agents learn a shared initialization together, and each "
        "agent adapts it to its own task by one or few local policy-gradient steps.\n\n"
        "Start with `perfedrl demo`. For your own fleet: `perfedrl inspect CONFIG` shows its agents, `perfedrl train "
        "CONFIG` trains them, and `perfedrl evaluate RUN` and `perfedrl personalize RUN` use the trained run.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    if group != NETWORK:
        from perfedrl.cli import agent, compare, estimators, runs, studies, theory

        app.command()(studies.demo)
        app.command()(runs.inspect)
        app.command()(runs.train)
        app.command()(runs.evaluate)
        app.command()(runs.personalize)
        app.command()(theory.theory)
        app.command()(estimators.estimators)
        app.command()(compare.compare)
        app.command()(studies.reproduce)
        app.command(name="list")(runs.list_)
        app.command()(agent.agent)
    from perfedrl.cli import federation

    app.add_typer(federation.app, name=NETWORK)
    return app


def main() -> None:
    """Run a command; a user's mistake is reported in one sentence, with exit code 2."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # for modules that a config names; installed modules come first
    try:
        # typer.Exit in a command is returned as a number
        code = application(*sys.argv[1:2])(standalone_mode=False)
        if code == INTERRUPTED:
            raise KeyboardInterrupt
        sys.exit(code)
    except (KeyboardInterrupt, typer.Abort):
        print_message("stopped", "yellow")
        exit_immediately()
    except UserError as error:
        print_message(f"error: {error}", "red")
        sys.exit(2)
    except OSError as error:
        print_message(f"error: {error.filename or 'the system'}: {error.strerror or error}", "red")
        sys.exit(2)
    except Exception as error:
        if not hasattr(error, "format_message"):  # errors of the parser, such as an unknown option, have this method
            raise
        print_message(f"error: {error.format_message()}", "red")
        sys.exit(2)
