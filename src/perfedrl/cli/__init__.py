"""The command line: parse, call, print. One file per group of commands."""

import os
import sys

import typer

from perfedrl.cli.console import INTERRUPTED, leave_at_once, say
from perfedrl.errors import UserError

NETWORK = "federation"


def application(group: str | None = None) -> typer.Typer:
    """All commands; or those of the group `federation` alone, which run for weeks and need no JAX for that."""
    app = typer.Typer(
        help="Personalized federated reinforcement learning: agents learn one shared initialization together, and each "
        "turns it into its own policy with a single local policy-gradient step.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    if group != NETWORK:
        from perfedrl.cli import agent, compare, estimators, runs, studies, theory

        app.command()(studies.demo)
        app.command()(runs.train)
        app.command()(runs.personalize)
        app.command()(runs.evaluate)
        app.command()(runs.inspect)
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
    """The entry point: a user's mistake is one sentence and exit code 2."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # where a config's own modules are; those that are installed come first
    try:
        # what a command leaves with typer.Exit comes back as a number
        code = application(*sys.argv[1:2])(standalone_mode=False)
        if code == INTERRUPTED:
            raise KeyboardInterrupt
        sys.exit(code)
    except (KeyboardInterrupt, typer.Abort):
        say("stopped", "yellow")
        leave_at_once()
    except UserError as error:
        say(f"error: {error}", "red")
        sys.exit(2)
    except OSError as error:
        say(f"error: {error.filename or 'the system'}: {error.strerror or error}", "red")
        sys.exit(2)
    except Exception as error:
        if not hasattr(error, "format_message"):  # what the parser raises for a wrong option or command has it
            raise
        say(f"error: {error.format_message()}", "red")
        sys.exit(2)
