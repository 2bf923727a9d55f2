"""The command `perfedrl agent`: one agent of a networked fleet."""

from pathlib import Path
from typing import Annotated

import typer

from perfedrl import compilation
from perfedrl.cli.console import Cache, print_message, print_warnings
from perfedrl.federation.agent.config import load_agent_config
from perfedrl.federation.agent.daemon import serve
from perfedrl.federation.agent.daemon_client import line_of


def agent(
    socket: Annotated[Path, typer.Option(help="The Unix socket to listen on, in a folder that only you can write to.")],
    state: Annotated[Path, typer.Option(help="The agent's own folder, for its answers and personal state.")],
    number: Annotated[int, typer.Option(help="The agent's number in the federation, from 0; it seeds the agent.")],
    file: Annotated[
        Path | None, typer.Argument(help="A TOML file with the agent's environment, limits, privacy and trust.")
    ] = None,
    env: Annotated[
        str | None, typer.Option(help='An environment instead of the file\'s: a name, or "package.module:function".')
    ] = None,
    compile_cache: Cache = True,
) -> None:
    """Run one agent of a networked fleet: it has the environment, trains on it, and keeps its personal state.

    Runs until Ctrl-C or SIGTERM, and continues from its last answer when it is restarted; `perfedrl federation join`
    starts it for you.

    The file is TOML. fleet.env = "arc" names the environment, or your own as "my_package.robot:make"; its settings go
    beside it, as in an experiment's config. agent = 2 selects an agent of that fleet; the default is the only agent, or
    the agent's number. folder = "robots" is where your own modules are, relative to the file; by default they are
    looked for beside the file, and in the folder in which the command runs. limits.trajectories_per_round,
    limits.episodes and limits.seconds limit one request. privacy.least_noise, privacy.largest_clip, privacy.epsilon and
    privacy.delta are the least noise and the largest clip of a server's plan, and the agent's privacy budget for its
    lifetime. trust lists import paths that the server's plan may name; by default there are none. With keep = "better"
    the agent keeps the shared policy if its own step made it worse. With tell_outcomes = false, which is the default
    with privacy, the agent does not report its outcomes.

    Your own environment is a function that returns a fleet or a task, or that takes the policy and returns a sampler:
    a subclass of perfedrl.rollout.PythonSampler with a discount and sample(params, key, m) -> Trajectory.

    Example: perfedrl agent agent.toml --socket own/agent.sock --state own --number 2
    """
    config = load_agent_config(file, env)
    if compile_cache:
        compilation.enable_cache()
    greeting = f"agent {number} ({config.env}) listens at {socket}"

    def tell(what: str) -> None:
        print_message(line_of(number, what))

    def stopped() -> None:
        print_message(f"agent {number} stopped")

    with print_warnings(tell):
        serve(config, number, socket, state, ready=lambda: print_message(greeting), tell=tell, stopped=stopped)
