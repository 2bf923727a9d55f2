"""The commands `train`, `evaluate`, `inspect` and `list`."""

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
from perfedrl.estimators import ADVANTAGES, BASELINES, CURVATURES
from perfedrl.experiments import inspection, run_list, store
from perfedrl.experiments.assessment import Assessment, assess
from perfedrl.experiments.config import Config, load_config, read_config
from perfedrl.experiments.evaluate import evaluate as evaluate_run
from perfedrl.experiments.files import check_file, write_atomically
from perfedrl.experiments.training import train as train_configs
from perfedrl.policies import POLICIES
from perfedrl.report import contents, page, tables
from perfedrl.report.run_page import run_page
from perfedrl.simulation.evaluation import EVALUATIONS
from perfedrl.studies import STUDIES

REGISTRIES = {
    "envs": ENVS,
    "policies": POLICIES,
    "estimators": CURVATURES,
    "baselines": BASELINES,
    "advantages": ADVANTAGES,
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
    advantages = "advantages"
    algorithms = "algorithms"
    aggregations = "aggregations"
    attacks = "attacks"
    evaluations = "evaluations"
    experiments = "experiments"


RunFolder = Annotated[Path, typer.Argument(help="The folder of a finished run.")]
Last = Annotated[
    bool, typer.Option("--last", help='Use the parameters of the last round, also of a run with keep = "best".')
]
Alpha = Annotated[float | None, typer.Option(help="Adapt with this step size instead of the run's own.")]


def train(
    config: Annotated[
        Path, typer.Argument(help="A TOML file (the folder configs/ has examples), or the folder of a finished run.")
    ],
    runs: console.RunsFolder = Path("runs"),
    rounds: Annotated[
        int | None,
        typer.Option(help="Train for this many rounds in all; a finished run of fewer rounds goes on from its end."),
    ] = None,
    restart: console.Restart = False,
    chunk: console.Chunk = None,
    report: console.ReportFile = None,
    compile_cache: console.Cache = True,
    trust: console.Trust = False,
) -> None:
    """Train the fleet that a config describes, on this machine.

    A finished run is read from disk and not trained again, unless the config or code of yours that it names has
    changed; the last line says which. An interrupted run continues from its checkpoint, and a finished run goes on from
    its end if the config has more rounds now. The longer run of a run's folder is saved beside it.

    Examples: perfedrl train configs/arc.toml --report arc.html;
    perfedrl train runs/arc-recommended-0123456789 --rounds 200
    """
    if report:
        check_file(report)
    compilation.use_all_cores()
    if config.is_dir():
        reject_networked(config)
        config, runs = config / "config.toml", config.absolute().parent
    checked = load_config(config, trust=trust) if rounds is None else with_rounds(config, rounds, trust)
    with console.training(restart) as observers:
        run = train_configs(
            checked, runs, restart=restart, chunk=chunk, observers=observers, compile_cache=compile_cache
        )
    console.out.print(tables.summary(run))
    for sentence in tables.failures(run.provenance):
        console.print_message(sentence, "yellow")
    console.out.print(tables.cost_and_folder(run), highlight=False, soft_wrap=True)
    if report:
        console.print_written([page.write(run_page(run, console.command_line()), report)])


def reject_networked(folder: Path) -> None:
    """Reject a run that was trained over a network: a simulation would not have its agents."""
    finished = (folder / "provenance.json").exists()  # a folder of an interrupted run has none
    if finished and store.read_provenance(folder).get("federation") is not None:
        raise UserError(
            f"{folder} was trained over a network, and its agents are not here; train its config again with "
            "`perfedrl federation train`"
        )


def with_rounds(path: Path, rounds: int, trust: bool) -> Config:
    """Load a config with another number of rounds."""
    try:
        config = read_config(path, trust=trust).with_rounds(rounds)
        config.experiment  # noqa: B018
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    return config


def evaluate(
    run: RunFolder,
    alpha: Alpha = None,
    steps: Annotated[
        int | None, typer.Option(help="Instead measure unseen agents after each of this many policy-gradient steps.")
    ] = None,
    trajectories: Annotated[
        int | None, typer.Option(help="With --steps: trajectories that an agent samples in each step; 20 by default.")
    ] = None,
    scratch: Annotated[
        float | None,
        typer.Option(help="With --steps: also measure agents that start from scratch, with this step size."),
    ] = None,
    last: Last = False,
    trust: console.Trust = False,
    json_file: console.JsonFile = None,
) -> None:
    """Evaluate a run's initialization for each agent, before and after adaptation.

    Agents with finitely many states are evaluated exactly, and their optimal returns are shown;
    other agents are evaluated over fresh episodes.

    With --steps the table shows the mean and the worst held-out agent after 0, 1, ... steps.

    Examples: perfedrl evaluate runs/grid-exact-alpha2-0123456789;
    perfedrl evaluate runs/arc-recommended-0123456789 --steps 3 --trajectories 50 --scratch 1.0
    """
    if json_file:
        check_file(json_file)
    compilation.use_all_cores()
    compilation.enable_cache()
    if steps is not None:
        loaded, each = load(run, last, trust), 20 if trajectories is None else trajectories
        evaluate_steps(loaded, steps, each, alpha, scratch, json_file)
        return
    for name, value in {"--scratch": scratch, "--trajectories": trajectories}.items():
        if value is not None:
            raise UserError(f"{name} goes with --steps; set --steps to the number of steps that agents take")
    rows = evaluate_run(load(run, last, trust), alpha)
    console.out.print(tables.agents(run.name, rows))
    if json_file:
        content = [{**row._asdict(), "before": row.before._asdict(), "after": row.after._asdict()} for row in rows]
        write_atomically(json_file, console.as_json(content))
        console.print_written([json_file])


def inspect(
    config: Annotated[Path, typer.Argument(help="A TOML file; see the folder configs/ for examples.")],
    agent: Annotated[
        int, typer.Option(help="The agent whose episode is drawn: training agents from 0, then held-out agents.")
    ] = 0,
    picture: Annotated[
        Path | None, typer.Option(help="File for the picture of an episode (.png); by default NAME-episode.png.")
    ] = None,
    trust: console.Trust = False,
) -> None:
    """Show the agents of a config, the settings in which they differ and the cost of a round, and draw an episode.

    Nothing is trained; the episode is played with the policy that training starts from.

    Example: perfedrl inspect configs/gym_cart_poles.toml --agent 3
    """
    if picture and picture.suffix != ".png":
        raise UserError(f"--picture must be a .png file, got {picture}")
    checked = load_config(config, trust=trust)
    picture = picture or Path(f"{checked.name}-episode.png")
    check_file(picture)
    try:
        inspected = inspection.inspect(checked)
        task, params, episode = inspection.episode(checked, agent)
        console.out.print(tables.fleet(checked.name, inspected))
        console.out.print(tables.fleet_cost(inspected), highlight=False, soft_wrap=True)
        console.out.print(tables.new_agent(inspected), highlight=False, markup=False, soft_wrap=True)
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


def load(folder: Path, last: bool, trust: bool) -> store.Run:
    """Load a run, and say which of its parameters are used if it keeps the best ones."""
    run = store.load_run(folder, trust=trust)
    run = run.at_end if last else run
    if run.kept:
        console.out.print(f"{folder.name}: {run.kept}", highlight=False, soft_wrap=True)
    if "federation" in run.provenance:
        console.print_warning(
            f"{folder.name} was trained over a network; its agents are not here, and those below are made from [fleet] "
            "of the server's config"
        )
    return run


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
        console.print_written([json_file])


def outcome_lists(assessment: Assessment) -> dict[str, Any]:
    """The outcomes of an assessment as lists by seed, step and agent."""
    return {name: x.tolist() for name, x in assessment.outcomes.items()}


def list_(
    kind: Annotated[
        Kind, typer.Argument(help="Finished runs, parts of configs, or the experiments that `reproduce` knows.")
    ] = Kind.runs,
    runs: console.RunsFolder = Path("runs"),
    json_file: console.JsonFile = None,
) -> None:
    """List finished and interrupted runs, or the parts that a config can name, with their parameters.

    Examples: perfedrl list; perfedrl list algorithms; perfedrl list envs --json envs.json
    """
    if json_file:
        check_file(json_file)
    if kind is Kind.runs:
        found, interrupted = list(readable_runs(runs)), run_list.list_interrupted(runs)
        console.out.print(tables.runs(found) if found else f"no finished runs in {runs}")
        for item in interrupted:
            state, hint = ("training", "") if item.training else ("interrupted", "; train its config to go on")
            place = f"{item.folder.name}, round {item.round} of {item.rounds}"
            console.out.print(f"{state}: {place}{hint}", highlight=False)
        content = contents.runs(found, interrupted)
    elif kind is Kind.experiments:
        console.out.print(tables.titles(STUDIES))
        content = contents.titles(STUDIES)
    else:
        console.out.print(tables.parts(REGISTRIES[kind]))
        content = contents.parts(REGISTRIES[kind])
    if json_file:
        write_atomically(json_file, console.as_json(content))
        console.print_written([json_file])


def readable_runs(root: Path) -> Iterator[run_list.FinishedRun]:
    """Read the finished runs in a folder; print why others cannot be read."""
    for folder in run_list.list_finished(root):
        try:
            yield run_list.read_finished(folder)
        except UserError as error:
            console.print_message(f"skipped: {error}", "yellow")
