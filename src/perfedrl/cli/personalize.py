"""The command `personalize`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from perfedrl import compilation
from perfedrl.cli import console
from perfedrl.cli.runs import Alpha, Last, RunFolder, load
from perfedrl.cli.set_option import parse_settings
from perfedrl.errors import UserError
from perfedrl.experiments import personalize as personalization
from perfedrl.experiments.files import check_file, write_atomically
from perfedrl.report import contents, tables

LONGEST_LABEL = 80
"""Characters of an agent's name in the name of its file."""


class Keep(StrEnum):
    """Which policy is written."""

    adapted = "adapted"
    better = "better"


Goal = Annotated[
    str | None, typer.Option(help="Goal of a new agent in the run's world, as --set goal=X,Y.", metavar="X,Y")
]
Number = Annotated[int | None, typer.Option(help="An agent of the run: training agents from 0, then held-out agents.")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="A setting of a new agent, once for each; with --agent the others are that agent's. Without an agent, "
        "the run's settings are listed. `perfedrl inspect` lists those of a config.",
        metavar="NAME=VALUE",
    ),
]
From = Annotated[
    Path | None, typer.Option("--from", help="Go on with the policy in this file instead of the run's shared one.")
]
Kept = Annotated[
    Keep, typer.Option(help="Write the adapted policy, or the better one of it and the one that it started from.")
]
Steps = Annotated[
    int | None,
    typer.Option(help="Policy-gradient steps; by default those of the algorithm, which share --trajectories."),
]
Out = Annotated[
    Path | None,
    typer.Option("--out", help="File for the policy (.safetensors); the picture is written next to it."),
]


def personalize(
    run: RunFolder,
    goal: Goal = None,
    agent: Number = None,
    settings: Set = None,
    start: From = None,
    keep: Kept = Keep.adapted,
    trajectories: Annotated[int, typer.Option(help="Trajectories that the agent samples in each step.")] = 200,
    steps: Steps = None,
    alpha: Alpha = None,
    seed: Annotated[int | None, typer.Option(help="The run's seed to start from; by default the first.")] = None,
    draw: Annotated[int, typer.Option(help="Any number; another number gives other trajectories and episodes.")] = 0,
    last: Last = False,
    trust: console.Trust = False,
    file: Out = None,
    json_file: console.JsonFile = None,
) -> None:
    """Adapt a run's shared initialization to one agent, and show the agent's outcomes before and after.

    The agent is one of the run, by its number, or a new one, by its settings. Writes the agent's policy and a picture
    of episodes before and after. In Python, perfedrl.load_policy(FILE).act(observation) acts with the policy.

    Examples: perfedrl personalize runs/arc-recommended-0123456789 --goal 0.6,0.5;
    perfedrl personalize runs/cart-poles-personalized-0123456789 --set length=0.3 --set masscart=1.2;
    perfedrl personalize runs/arc-recommended-0123456789 --agent 7 --trajectories 100 --out mine.safetensors;
    perfedrl personalize runs/arc-recommended-0123456789 --from mine.safetensors --out further.safetensors
    """
    chosen: dict[str, Any] = {
        "goal": None if goal is None else parse_goal(goal),
        "agent": agent,
        "settings": parse_settings(settings or ()) or None,
    }
    if file and file.suffix != ".safetensors":
        raise UserError(f"--out must be a .safetensors file, got {file}; the picture is written next to it")
    for path in (file, file and file.with_suffix(".png"), json_file):
        if path:
            check_file(path)
    compilation.enable_cache()
    numbers: dict[str, Any] = {"trajectories": trajectories, "steps": steps, "alpha": alpha, "seed": seed, "draw": draw}
    result = personalization.personalize(load(run, last, trust), **chosen, start=start, keep=keep.value, **numbers)
    console.out.print(tables.personalized(result))
    console.out.print(tables.personal_cost(result), highlight=False, soft_wrap=True)
    written = save_personalized(result, file)
    if json_file:
        write_atomically(json_file, console.as_json(contents.personalized(result, written[0])))
        written.append(json_file)
    console.print_written(written)


def save_personalized(result: personalization.Personalized, file: Path | None) -> list[Path]:
    """Write an agent's policy and, if its episodes are paths in the plane, a picture next to it."""
    from perfedrl.report import run_figures, static  # matplotlib is slow to import

    file = file or Path("personalized") / f"{result.run.folder.name}-{file_label(result)}.safetensors"
    written = [result.save(file)]
    for plot in run_figures.before_and_after(result):
        picture = file.with_suffix(".png")
        write_atomically(picture, static.image(static.draw(plot)))
        written.append(picture)
    return written


def file_label(result: personalization.Personalized) -> str:
    """The part of a file name that identifies a personalization."""
    agent = "".join(c if c.isalnum() or c in ".-" else "_" for c in result.agent.partition(" (")[0])[:LONGEST_LABEL]
    after = f"-after{len(result.earlier)}" if result.earlier else ""
    return f"{agent}-seed{result.seed}-draw{result.draw}-{result.steps}x{result.trajectories}{after}"


def parse_goal(text: str) -> tuple[float, ...]:
    """Parse numbers separated by commas."""
    try:
        return tuple(float(x) for x in text.split(","))
    except ValueError as error:
        raise UserError(f"--goal must be two numbers X,Y, such as 0.6,0.5, got {text!r}") from error
