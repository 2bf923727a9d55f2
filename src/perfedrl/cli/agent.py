"""The command of one agent of a networked fleet."""

from pathlib import Path
from typing import Annotated

import typer

from perfedrl import compilation
from perfedrl.cli.console import Cache, say
from perfedrl.federation.agent.config import load_agent_config
from perfedrl.federation.agent.daemon import serve


def agent(
    socket: Annotated[Path, typer.Option(help="Where to listen: a Unix socket, in a folder that is yours alone.")],
    state: Annotated[Path, typer.Option(help="A folder of the agent's own, for what it remembers.")],
    number: Annotated[int, typer.Option(help="The agent's number in the federation, from 0; its random numbers.")],
    file: Annotated[
        Path | None, typer.Argument(help="A TOML file: the agent's environment, its limits, whom it trusts.")
    ] = None,
    env: Annotated[
        str | None, typer.Option(help='Another environment than the file\'s: a name, or "package.module:function".')
    ] = None,
    compile_cache: Cache = True,
) -> None:
    """Be one agent of a fleet over a network: own the environment, train on it, keep what is personal.

    Runs until Ctrl-C or SIGTERM, and goes on where it stood when it is started again; `perfedrl federation join` starts
    it for you.

    The file is TOML. fleet.env = "arc" names the environment, or one of your own as "my_package.robot:make"; its
    settings go beside it, as in an experiment's config. agent = 2 says which of the fleet's agents this is; left out,
    its number does. limits.trajectories_per_round, limits.episodes and limits.seconds are what the agent does at most
    for one request. trust lists import paths that the server's plan may name here; by default there are none. With
    tell_outcomes = false the agent keeps to itself how well it does.

    An environment of your own is a function that returns a fleet or a task, or that takes the policy and returns a
    sampler: an object with traceable = False, a discount, and sample(params, key, m) -> Trajectory.

    Example: perfedrl agent agent.toml --socket own/agent.sock --state own --number 2
    """
    config = load_agent_config(file, env)
    if compile_cache:
        compilation.enable_cache()
    greeting = f"agent {number} ({config.env}) listens at {socket}"
    serve(config, number, socket, state, ready=lambda: say(greeting))
    say(f"agent {number} stopped")
