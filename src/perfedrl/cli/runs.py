"""The commands `train`, `personalize`, `evaluate`, `inspect` and `list`."""

from collections.abc import Iterator
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from perfedrl import compilation
from perfedrl.algorithms import AGGREGATIONS, ALGORITHMS, ATTACKS
from perfedrl.cli import console
from perfedrl.envs import ENVS
from perfedrl.envs.gym.rendering import PictureError
from perfedrl.errors import UserError
from perfedrl.estimators import BASELINES, CURVATURES
from perfedrl.experiments import inspection, store
from perfedrl.experiments import personalize as personalization
from perfedrl.experiments.assessment import Assessment, assess
from perfedrl.experiments.config import load_config
from perfedrl.experiments.evaluate import evaluate as evaluate_run
from perfedrl.experiments.files import check_file, write_atomically
from perfedrl.experiments.training import train as train_configs
from perfedrl.policies import POLICIES
from perfedrl.report import page, tables
from perfedrl.report.run_page import run_page
from perfedrl.simulation.evaluation import EVALUATIONS
from perfedrl.studies import STUDIES

REGISTRIES = {
    "envs": ENVS,
    "policies": POLICIES,
    "estimators": CURVATURES,
    "baselines": BASELINES,
    "algorithms": ALGORITHMS,
    "aggregations": AGGREGATIONS,
    "attacks": ATTACKS,
    "evaluations": EVALUATIONS,
}


class Kind(StrEnum):
    """The kinds of things that `perfedrl list` lists."""

    runs = "runs"
    envs = "envs"
    policies = "policies"
    estimators = "estimators"
    baselines = "baselines"
    algorithms = "algorithms"
    aggregations = "aggregations"
    attacks = "attacks"
    evaluations = "evaluations"
    experiments = "experiments"


RunFolder = Annotated[Path, typer.Argument(help="The folder of a finished run.")]
Alpha = Annotated[float | None, typer.Option(help="Adapt with this step size instead of the run's own.")]


def train(
    config: Annotated[Path, typer.Argument(help="A TOML file; see the folder configs/ for examples.")],
    runs: console.RunsFolder = Path("runs"),
    restart: console.Restart = False,
    chunk: console.Chunk = None,
    report: console.ReportFile = None,
    compile_cache: console.Cache = True,
) -> None:
    """Train the fleet that a config describes, on this machine.

    A finished run is shown and not trained again; an interrupted run continues from its checkpoint.

    Example: perfedrl train configs/arc.toml --report arc.html
    """
    if report:
        check_file(report)
    compilation.use_all_cores()
    checked = load_config(config)
    with console.training(restart) as observers:
        run = train_configs(
            checked, runs, restart=restart, chunk=chunk, observers=observers, compile_cache=compile_cache
        )
    console.out.print(tables.summary(run))
    console.out.print(f"{tables.cost(run)}\nsaved in {run.folder}", highlight=False, soft_wrap=True)
    if report:
        console.print_written([page.write(run_page(run, console.command_line()), report)])


def personalize(
    run: RunFolder,
    goal: Annotated[
        str | None, typer.Option(help="Goal of a new agent in the run's world; this or --agent.", metavar="X,Y")
    ] = None,
    agent: Annotated[
        int | None, typer.Option(help="An agent of the run: training agents from 0, then held-out agents.")
    ] = None,
    trajectories: Annotated[int, typer.Option(help="Trajectories that the agent samples in each step.")] = 200,
    steps: Annotated[
        int | None,
        typer.Option(help="Policy-gradient steps; by default those of the algorithm, which share --trajectories."),
    ] = None,
    alpha: Alpha = None,
    seed: Annotated[int | None, typer.Option(help="The run's seed to start from; by default the first.")] = None,
    draw: Annotated[int, typer.Option(help="Any number; another number gives other trajectories and episodes.")] = 0,
    file: Annotated[
        Path | None,
        typer.Option("--out", help="File for the parameters (.safetensors); the picture is written next to it."),
    ] = None,
) -> None:
    """Adapt a run's shared initialization to one agent, and show the agent's outcomes before and after.

    Writes the agent's parameters (safetensors) and a picture of episodes before and after.

    Examples: perfedrl personalize runs/arc-recommended-0123456789 --goal 0.6,0.5;
    perfedrl personalize runs/arc-recommended-0123456789 --agent 7 --trajectories 100 --out mine.safetensors
    """
    position = None if goal is None else parse_goal(goal)
    if file and file.suffix != ".safetensors":
        raise UserError(f"--out must be a .safetensors file, got {file}; the picture is written next to it")
    for path in (file, file and file.with_suffix(".png")):
        if path:
            check_file(path)
    compilation.enable_cache()
    loaded = store.load_run(run)
    result = personalization.personalize(
        loaded,
        goal=position,
        agent=agent,
        trajectories=trajectories,
        steps=steps,
        alpha=alpha,
        seed=seed,
        draw=draw,
    )
    console.out.print(tables.personalized(result))
    console.out.print(tables.personal_cost(result), highlight=False, soft_wrap=True)
    console.print_written(save_personalized(result, loaded, file))


def evaluate(
    run: RunFolder,
    alpha: Alpha = None,
    steps: Annotated[
        int | None, typer.Option(help="Instead measure unseen agents after each of this many policy-gradient steps.")
    ] = None,
    trajectories: Annotated[
        int, typer.Option(help="With --steps: trajectories that an agent samples in each step.")
    ] = 20,
    scratch: Annotated[
        float | None,
        typer.Option(help="With --steps: also measure agents that start from scratch, with this step size."),
    ] = None,
    json_file: console.JsonFile = None,
) -> None:
    """Evaluate a run's initialization for each agent, before and after adaptation.

    Agents with finitely many states are evaluated exactly, and their optimal returns are shown;
    other agents are evaluated over fresh episodes.

    With --steps the table shows the mean and the worst held-out agent after 0, 1, ... steps.

    Examples: perfedrl evaluate runs/gridworld-0123456789;
    perfedrl evaluate runs/arc-recommended-0123456789 --steps 3 --trajectories 50 --scratch 1.0
    """
    if json_file:
        check_file(json_file)
    compilation.use_all_cores()
    compilation.enable_cache()
    if steps is not None:
        evaluate_steps(store.load_run(run), steps, trajectories, alpha, scratch, json_file)
        return
    if scratch is not None:
        raise UserError("--scratch goes with --steps; set --steps to the number of steps that agents take")
    rows = evaluate_run(store.load_run(run), alpha)
    console.out.print(tables.agents(run.name, rows))
    if json_file:
        content = [{**row._asdict(), "before": row.before._asdict(), "after": row.after._asdict()} for row in rows]
        write_atomically(json_file, console.as_json(content))


def inspect(
    config: Annotated[Path, typer.Argument(help="A TOML file; see the folder configs/ for examples.")],
    agent: Annotated[
        int, typer.Option(help="The agent whose episode is drawn: training agents from 0, then held-out agents.")
    ] = 0,
    picture: Annotated[
        Path | None, typer.Option(help="File for the picture of an episode (.png); by default NAME-episode.png.")
    ] = None,
) -> None:
    """Show the agents of a config, the settings in which they differ and the cost of a round, and draw an episode.

    Nothing is trained; the episode is played with the policy that training starts from.

    Example: perfedrl inspect configs/gym_cart_poles.toml --agent 3
    """
    if picture and picture.suffix != ".png":
        raise UserError(f"--picture must be a .png file, got {picture}")
    checked = load_config(config)
    picture = picture or Path(f"{checked.name}-episode.png")
    check_file(picture)
    try:
        inspected = inspection.inspect(checked)
        task, params, episode = inspection.episode(checked, agent)
        console.out.print(tables.fleet(checked.name, inspected))
        console.out.print(tables.fleet_cost(inspected), highlight=False, soft_wrap=True)
        from perfedrl.report import episode_strip, static  # matplotlib is slow to import

        if episode is not None and episode_strip.can_draw(task, episode):
            title = f"{checked.name}: agent {agent},\nunder the policy that training starts from"
            figure = episode_strip.draw_episode(task, checked.experiment.policy, params, episode, title)
            write_atomically(picture, static.image(figure))
            console.print_written([picture])
        else:
            console.out.print("an episode of these agents cannot be drawn")
    except PictureError as error:
        console.print_message(str(error), "yellow")
    finally:
        checked.experiment.fleet.close()


def evaluate_steps(
    run: store.Run, steps: int, trajectories: int, alpha: float | None, scratch: float | None, json_file: Path | None
) -> None:
    """Print and write the outcomes of unseen agents after each step."""
    assessments = [assess(run, steps=steps, trajectories=trajectories, alpha=alpha)]
    if scratch is not None:
        assessments.append(assess(run, steps=steps, trajectories=trajectories, alpha=scratch, scratch=True))
    for assessment in assessments:
        console.out.print(tables.assessment(run.folder.name, assessment))
    console.out.print(tables.assessment_cost(assessments[0]), highlight=False, soft_wrap=True)
    if json_file:
        write_atomically(json_file, console.as_json([{**asdict(x), "outcomes": outcome_lists(x)} for x in assessments]))


def outcome_lists(assessment: Assessment) -> dict[str, Any]:
    """The outcomes of an assessment as lists by seed, step and agent."""
    return {name: x.tolist() for name, x in assessment.outcomes.items()}


def list_(
    kind: Annotated[
        Kind, typer.Argument(help="Finished runs, parts of configs, or the experiments that `reproduce` knows.")
    ] = Kind.runs,
    runs: console.RunsFolder = Path("runs"),
) -> None:
    """List finished runs, or the parts that a config can name, with their parameters.

    Examples: perfedrl list; perfedrl list algorithms; perfedrl list envs
    """
    if kind is Kind.runs:
        table = tables.runs(readable_runs(runs))
        console.out.print(table if table.row_count else f"no finished runs in {runs}")
    elif kind is Kind.experiments:
        console.out.print(tables.titles(STUDIES))
    else:
        console.out.print(tables.parts(REGISTRIES[kind]))


def save_personalized(result: personalization.Personalized, run: store.Run, file: Path | None) -> list[Path]:
    """Write an agent's parameters and, if its episodes are paths in the plane, a picture next to them."""
    from perfedrl.report import run_figures, static  # matplotlib is slow to import

    file = file or Path("personalized") / f"{run.folder.name}-{file_label(result)}.safetensors"
    written = [result.save(file, run=run.folder.name, digest=run.config.digest)]
    for plot in run_figures.before_and_after(result):
        picture = file.with_suffix(".png")
        write_atomically(picture, static.image(static.draw(plot)))
        written.append(picture)
    return written


def file_label(result: personalization.Personalized) -> str:
    """The part of a file name that identifies a personalization."""
    agent = "".join(c if c.isalnum() or c in ".-" else "_" for c in result.agent.partition(" (")[0])
    return f"{agent}-seed{result.seed}-draw{result.draw}-{result.steps}x{result.trajectories}"


def parse_goal(text: str) -> tuple[float, ...]:
    """Parse numbers separated by commas."""
    try:
        return tuple(float(x) for x in text.split(","))
    except ValueError as error:
        raise UserError(f"--goal must be two numbers X,Y, such as 0.6,0.5, got {text!r}") from error


def readable_runs(root: Path) -> Iterator[Any]:
    """Load the finished runs in a folder; print why others cannot be read."""
    for folder in store.list_runs(root):
        try:
            yield store.load_run(folder)
        except UserError as error:
            console.print_message(f"skipped: {error}", "yellow")
