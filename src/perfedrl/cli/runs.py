"""Commands around one run: inspect, train, personalize, evaluate, list."""

from collections.abc import Iterator
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from perfedrl import compilation
from perfedrl.algorithms import AGGREGATIONS, ALGORITHMS, ATTACKS
from perfedrl.cli.console import (
    Cache,
    Chunk,
    JsonFile,
    ReportFile,
    Restart,
    RunsFolder,
    as_json,
    command_line,
    out,
    say,
    training,
    wrote,
)
from perfedrl.envs import ENVS
from perfedrl.envs.gym.rendering import PictureError
from perfedrl.errors import UserError
from perfedrl.estimators import BASELINES, CURVATURES
from perfedrl.experiments import inspection, store
from perfedrl.experiments import personalize as own
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
    """What `perfedrl list` can list."""

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
    runs: RunsFolder = Path("runs"),
    restart: Restart = False,
    chunk: Chunk = None,
    report: ReportFile = None,
    compile_cache: Cache = True,
) -> None:
    """Train a fleet on this machine, as a config says.

    A run that is there already is shown, not trained again; one that was stopped goes on where it stood.

    Example: perfedrl train configs/arc.toml --report arc.html
    """
    if report:
        check_file(report)
    compilation.use_all_cores()
    checked = load_config(config)
    with training(restart) as observers:
        run = train_configs(
            checked, runs, restart=restart, chunk=chunk, observers=observers, compile_cache=compile_cache
        )
    out.print(tables.summary(run))
    out.print(f"{tables.cost(run)}\nsaved in {run.folder}", highlight=False, soft_wrap=True)
    if report:
        wrote([page.write(run_page(run, command_line()), report)])


def personalize(
    run: RunFolder,
    goal: Annotated[str | None, typer.Option(help="The new agent's goal in the run's world.", metavar="X,Y")] = None,
    agent: Annotated[
        int | None, typer.Option(help="Or an agent of the run: training agents from 0, then those held out.")
    ] = None,
    trajectories: Annotated[int, typer.Option(help="Fresh trajectories per step; what it costs the agent.")] = 200,
    steps: Annotated[
        int | None, typer.Option(help="Policy-gradient steps from --trajectories each; as trained for when left out.")
    ] = None,
    alpha: Alpha = None,
    seed: Annotated[int | None, typer.Option(help="Which of the run's seeds to start from; its first.")] = None,
    draw: Annotated[int, typer.Option(help="Another number for other trajectories and episodes.")] = 0,
    file: Annotated[
        Path | None, typer.Option("--out", help="Where the parameters go (.safetensors); the picture goes beside them.")
    ] = None,
) -> None:
    """Turn a run's shared initialization into one agent's own policy, and show what that is worth to it.

    Writes the agent's parameters (safetensors) and a picture of episodes before and after.

    Examples: perfedrl personalize runs/arc-recommended-0123456789 --goal 0.6,0.5;
    perfedrl personalize runs/arc-recommended-0123456789 --agent 7 --trajectories 100 --out mine.safetensors
    """
    position = None if goal is None else parse_goal(goal)
    if file and file.suffix != ".safetensors":
        raise UserError(f"--out {file}: the parameters are a .safetensors file, and the picture goes beside it")
    for path in (file, file and file.with_suffix(".png")):
        if path:
            check_file(path)
    compilation.enable_cache()
    loaded = store.load_run(run)
    result = own.personalize(
        loaded,
        goal=position,
        agent=agent,
        trajectories=trajectories,
        steps=steps,
        alpha=alpha,
        seed=seed,
        draw=draw,
    )
    out.print(tables.personalized(result))
    out.print(tables.personal_cost(result), highlight=False, soft_wrap=True)
    wrote(save_personalized(result, loaded, file))


def evaluate(
    run: RunFolder,
    alpha: Alpha = None,
    steps: Annotated[
        int | None, typer.Option(help="Follow unseen agents over so many policy-gradient steps instead.")
    ] = None,
    trajectories: Annotated[int, typer.Option(help="With --steps: fresh trajectories for each.")] = 20,
    scratch: Annotated[
        float | None, typer.Option(help="With --steps: beside agents that start from scratch, with this step size.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Evaluate a run's initialization, agent by agent, before and after its adaptation step.

    Exact for agents with finitely many states, beside the best return there is; by fresh episodes for others. With
    --steps: what held-out agents get on average, and the worst of them, after none, one and more steps.

    Examples: perfedrl evaluate runs/gridworld-0123456789;
    perfedrl evaluate runs/arc-recommended-0123456789 --steps 3 --trajectories 50 --scratch 1.0
    """
    if json_file:
        check_file(json_file)
    compilation.use_all_cores()
    compilation.enable_cache()
    if steps is not None:
        step_by_step(store.load_run(run), steps, trajectories, alpha, scratch, json_file)
        return
    if scratch is not None:
        raise UserError("--scratch goes with --steps: say how many steps agents take")
    rows = evaluate_run(store.load_run(run), alpha)
    out.print(tables.agents(run.name, rows))
    if json_file:
        content = [{**row._asdict(), "before": row.before._asdict(), "after": row.after._asdict()} for row in rows]
        write_atomically(json_file, as_json(content))


def inspect(
    config: Annotated[Path, typer.Argument(help="A TOML file; see the folder configs/ for examples.")],
    agent: Annotated[int, typer.Option(help="Whose episode to draw: training agents from 0, then those held out.")] = 0,
    picture: Annotated[
        Path | None, typer.Option(help="Where the picture of an episode goes (.png); NAME-episode.png when left out.")
    ] = None,
) -> None:
    """Show what a config describes: its agents, what tells them apart, what a round costs; and draw an episode.

    Nothing is trained; the episode is one of the policy that training starts from.

    Example: perfedrl inspect configs/gym_cart_poles.toml --agent 3
    """
    if picture and picture.suffix != ".png":
        raise UserError(f"--picture {picture}: the picture is a .png file")
    checked = load_config(config)
    picture = picture or Path(f"{checked.name}-episode.png")
    check_file(picture)
    try:
        found = inspection.inspect(checked)
        task, params, episode = inspection.episode(checked, agent)
        out.print(tables.fleet(checked.name, found))
        out.print(tables.fleet_cost(found), highlight=False, soft_wrap=True)
        from perfedrl.report import episode_strip, static  # matplotlib is slow to import

        if episode is not None and episode_strip.can_draw(task, episode):
            title = f"{checked.name}: agent {agent},\nunder the policy that training starts from"
            figure = episode_strip.draw_episode(task, checked.experiment.policy, params, episode, title)
            write_atomically(picture, static.image(figure))
            wrote([picture])
        else:
            out.print("these agents have no way to draw an episode")
    except PictureError as error:
        say(str(error), "yellow")
    finally:
        checked.experiment.fleet.close()


def step_by_step(
    run: store.Run, steps: int, trajectories: int, alpha: float | None, scratch: float | None, json_file: Path | None
) -> None:
    """The evaluation protocol's table."""
    found = [assess(run, steps=steps, trajectories=trajectories, alpha=alpha)]
    if scratch is not None:
        found.append(assess(run, steps=steps, trajectories=trajectories, alpha=scratch, scratch=True))
    for one in found:
        out.print(tables.assessment(run.folder.name, one))
    out.print(tables.assessment_cost(found[0]), highlight=False, soft_wrap=True)
    if json_file:
        write_atomically(json_file, as_json([{**asdict(x), "outcomes": lists(x)} for x in found]))


def lists(found: Assessment) -> dict[str, Any]:
    """An assessment's outcomes by seed, step and agent."""
    return {name: x.tolist() for name, x in found.outcomes.items()}


def list_(
    kind: Annotated[Kind, typer.Argument(help="What to list.")] = Kind.runs,
    runs: RunsFolder = Path("runs"),
) -> None:
    """List finished runs, or the parts that a config can name, with their parameters."""
    if kind is Kind.runs:
        table = tables.runs(readable(runs))
        out.print(table if table.row_count else f"no finished runs in {runs}")
    elif kind is Kind.experiments:
        out.print(tables.titles(STUDIES))
    else:
        out.print(tables.parts(REGISTRIES[kind]))


def save_personalized(result: own.Personalized, run: store.Run, file: Path | None) -> list[Path]:
    """Write an agent's parameters and, where its episodes are paths in the plane, a picture beside them."""
    from perfedrl.report import run_figures, static  # matplotlib is slow to import

    file = file or Path("personalized") / f"{run.folder.name}-{label(result)}.safetensors"
    written = [result.save(file, run=run.folder.name, digest=run.config.digest)]
    for plot in run_figures.before_and_after(result):
        picture = file.with_suffix(".png")
        write_atomically(picture, static.image(static.draw(plot)))
        written.append(picture)
    return written


def label(result: own.Personalized) -> str:
    """A name for files that tells one personalization from another."""
    agent = "".join(c if c.isalnum() or c in ".-" else "_" for c in result.agent.partition(" (")[0])
    return f"{agent}-seed{result.seed}-draw{result.draw}-{result.steps}x{result.trajectories}"


def parse_goal(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(x) for x in text.split(","))
    except ValueError as error:
        raise UserError(f"--goal {text!r}: a goal is two numbers X,Y, such as 0.6,0.5") from error


def readable(root: Path) -> Iterator[Any]:
    """The finished runs in a folder; of those that cannot be read it says why."""
    for folder in store.list_runs(root):
        try:
            yield store.load_run(folder)
        except UserError as error:
            say(f"skipped: {error}", "yellow")
