"""The command `check`, which plays a Gymnasium environment and says what is wrong with it."""

from typing import Annotated

import typer

from perfedrl.cli import console
from perfedrl.cli.set_option import parse_settings
from perfedrl.envs.gym.check import check_env
from perfedrl.errors import UserError
from perfedrl.experiments.files import check_file, write_atomically

STYLES = {"error": "red", "warning": "yellow", "note": "none"}


def check(
    environment: Annotated[
        str,
        typer.Argument(help="An id that Gymnasium knows, or your own module:class, in this folder or installed."),
    ],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="A parameter of the environment; may be repeated.", metavar="NAME=VALUE"),
    ] = None,
    horizon: Annotated[
        int | None, typer.Option(help="Cut episodes off after this many decisions + 1, as in the fleet's config.")
    ] = None,
    scale_actions: Annotated[
        bool,
        typer.Option("--scale-actions/--no-scale-actions", help="Whether the fleet maps [-1, 1] to the action box."),
    ] = True,
    episodes: Annotated[int, typer.Option(help="Episodes to play, with random actions.")] = 5,
    json_file: console.JsonFile = None,
) -> None:
    """Play a Gymnasium environment, and name in one sentence each what is wrong with it.

    Errors must be mended before training: return values of old Gym, observations of another shape or kind of number
    than declared, rewards that are arrays, numbers that are not finite. Warnings say what makes learning hard: actions
    without bounds, rewards or observations of extreme size, episodes that never end, randomness that ignores the seed.
    The exit code is 2 if there is an error, otherwise 0.

    Examples: perfedrl check CartPole-v1 --set length=0.3; perfedrl check my_env:MyEnv --horizon 99
    """
    if json_file:
        check_file(json_file)
    if environment.endswith(".toml"):
        raise UserError(
            f"expected an environment such as CartPole-v1 or my_env:MyEnv, got the config {environment}; "
            "`perfedrl inspect` checks a config"
        )
    found = check_env(
        environment,
        parse_settings(settings or ()),
        horizon=horizon,
        scale_actions=scale_actions,
        episodes=episodes,
    )
    console.out.print(found.environment, highlight=False, markup=False, soft_wrap=True)
    if found.summary:
        console.out.print(found.summary, highlight=False, markup=False, soft_wrap=True)
    for level, text in found.findings:
        console.out.print(f"{level}: {text}", style=STYLES[level], highlight=False, markup=False, soft_wrap=True)
    if not {level for level, _ in found.findings} - {"note"}:
        console.out.print("nothing is wrong")
    if json_file:
        content = {"environment": found.environment, "ok": found.ok, "summary": found.summary}
        findings = [{"level": level, "text": text} for level, text in found.findings]
        write_atomically(json_file, console.as_json({**content, "findings": findings}))
        console.print_written([json_file])
    if not found.ok:
        raise typer.Exit(2)
