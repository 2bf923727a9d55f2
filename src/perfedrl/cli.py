"""The command line: parse, call, print."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from perfedrl import compilation
from perfedrl.errors import UserError, nearest
from perfedrl.experiments.run import Interrupted

app = typer.Typer(
    help="Personalized federated reinforcement learning: agents learn one shared initialization together, and each "
    "turns it into its own policy with a single local policy-gradient step.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
out, err = Console(), Console(stderr=True)

RunsFolder = Annotated[Path, typer.Option("--runs", help="Where runs are kept.")]
Restart = Annotated[bool, typer.Option("--restart", help="Train again what is already there or half done.")]
Chunk = Annotated[int | None, typer.Option(help="Agents that run at a time, for fleets that exceed memory.")]
Cache = Annotated[bool, typer.Option("--compile-cache/--no-compile-cache", help="Keep compiled programs on disk.")]


class Kind(StrEnum):
    """What `perfedrl list` can list."""

    runs = "runs"
    envs = "envs"
    policies = "policies"
    estimators = "estimators"
    algorithms = "algorithms"
    experiments = "experiments"


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="A TOML file; see the folder configs/ for examples.")],
    runs: RunsFolder = Path("runs"),
    restart: Restart = False,
    chunk: Chunk = None,
    compile_cache: Cache = True,
) -> None:
    """Train a fleet on this machine, as a config says.

    A run that is there already is shown, not trained again; one that was stopped goes on where it stood.

    Example: perfedrl train configs/gridworld.toml
    """
    from perfedrl.experiments.config import load_config
    from perfedrl.experiments.run import train as train_config

    start(compile_cache)
    with training() as progress:
        run = train_config(load_config(config), runs, restart=restart, chunk=chunk, progress=progress)
    summarize(run)


@app.command()
def evaluate(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run.")],
    alpha: Annotated[float | None, typer.Option(help="Adapt with this step size instead of the run's own.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the table to this file.")] = None,
) -> None:
    """Evaluate a run's initialization exactly, agent by agent, before and after its adaptation step.

    Example: perfedrl evaluate runs/gridworld-0123456789
    """
    from perfedrl.experiments.evaluate import evaluate as evaluate_run
    from perfedrl.experiments.store import load_run, write_atomically

    start()
    rows = evaluate_run(load_run(run), alpha)
    table = Table("agent", "part", "before", "after", "optimum", title=f"{run.name}: expected return, 95 % intervals")
    for row in rows:
        table.add_row(row.agent, row.part, interval(row.before), interval(row.after), f"{row.optimum:.3f}")
    out.print(table)
    if json_file:
        content = [{**row._asdict(), "before": row.before._asdict(), "after": row.after._asdict()} for row in rows]
        write_atomically(json_file, (json.dumps(content, indent=2) + "\n").encode())


@app.command()
def reproduce(
    experiments: Annotated[list[str], typer.Argument(help="e1, e3, e6, or all.", metavar="EXPERIMENT...")],
    quick: Annotated[bool, typer.Option("--quick", help="A faithful miniature: fewer seeds.")] = False,
    seeds: Annotated[int | None, typer.Option(min=1, help="How many seeds; 10 as in the paper when left out.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the claims to this file.")] = None,
    figures: Annotated[Path, typer.Option(help="Where the figures go.")] = Path("figures"),
    runs: RunsFolder = Path("runs"),
    restart: Restart = False,
    compile_cache: Cache = True,
) -> None:
    """Repeat experiments of the paper: train what is missing, check every claim, draw the figures.

    Examples: perfedrl reproduce e1 --quick; perfedrl reproduce all --seeds 10 --json claims.json
    """
    from perfedrl.experiments import paper
    from perfedrl.experiments.run import train as train_configs
    from perfedrl.experiments.store import write_atomically
    from perfedrl.report.figures import draw

    chosen = [choose(name, paper.EXPERIMENTS) for name in expand(experiments, paper.EXPERIMENTS)]
    count = seeds or (paper.QUICK_SEEDS if quick else paper.SEEDS)
    start(compile_cache)
    with training() as progress:
        train_configs(paper.all_configs(chosen, count), runs, restart=restart, progress=progress)
    claims, written = [], []
    for experiment in chosen:
        done = {key: train_configs(config, runs) for key, config in experiment.configs(count).items()}
        claims += experiment.claims(done)
        written += draw(experiment.name, experiment.title, done, figures)
    print_claims(claims, count)
    for path in written:
        out.print(f"wrote {path}", highlight=False)
    if json_file:
        write_atomically(json_file, (json.dumps([asdict(claim) for claim in claims], indent=2) + "\n").encode())
        out.print(f"wrote {json_file}", highlight=False)


@app.command(name="list")
def list_(
    kind: Annotated[Kind, typer.Argument(help="What to list.")] = Kind.runs,
    runs: RunsFolder = Path("runs"),
) -> None:
    """List finished runs, or the parts that a config can name, with their parameters."""
    if kind is Kind.runs:
        return list_runs(runs)
    if kind is Kind.experiments:
        from perfedrl.experiments.paper import EXPERIMENTS

        table = Table("experiment", "what")
        for name, experiment in EXPERIMENTS.items():
            table.add_row(name, experiment.title)
        return out.print(table)
    table = Table("name", "parameters (and defaults)", "what")
    for name, entry in registry_of(kind).items():
        params = [str(p).partition(":")[0] + default(p) for p in registry_of(kind).parameters(name).values()]
        about = (entry.__doc__ or "").strip().partition("\n")[0]
        table.add_row(name, "" if kind is Kind.estimators else ", ".join(params), about)
    return out.print(table)


def registry_of(kind: Kind) -> Any:
    from perfedrl.algorithms import ALGORITHMS
    from perfedrl.envs import ENVS
    from perfedrl.estimators import CURVATURES
    from perfedrl.policies import POLICIES

    return {"envs": ENVS, "policies": POLICIES, "estimators": CURVATURES, "algorithms": ALGORITHMS}[kind]


def default(parameter: Any) -> str:
    return "" if parameter.default is parameter.empty else f"={parameter.default}"


def list_runs(root: Path) -> None:
    from perfedrl.experiments import store

    table = Table("run", "algorithm", "rounds", "seeds", "return after adaptation", "seconds", "finished")
    for folder in store.list_runs(root):
        try:
            run = store.load_run(folder)
        except UserError as error:
            err.print(f"skipped: {error}", style="yellow", highlight=False)
            continue
        after = f"{run.history.after[:, -1].mean():.3f}"
        table.add_row(
            folder.name, run.config.algorithm["name"], str(run.config.rounds), str(len(run.config.seeds)), after,
            f"{run.provenance['seconds']:.1f}", run.provenance["finished"],
        )  # fmt: skip
    out.print(table if table.row_count else f"no finished runs in {root}")


def expand(names: list[str], known: Any) -> list[str]:
    return list(known) if "all" in names else list(dict.fromkeys(names))


def choose(name: str, known: Any) -> Any:
    if name not in known:
        raise UserError(f"unknown experiment {name!r}{nearest(name, [*known, 'all'])}")
    return known[name]


def start(compile_cache: bool = True) -> None:
    compilation.use_all_cores()
    if compile_cache:
        compilation.enable_cache()


@contextmanager
def training() -> Iterator[Any]:
    """A progress bar per group of runs that train together; Ctrl-C ends with how to go on."""
    try:
        with progress_bars() as update:
            yield update
    except Interrupted as stop:
        err.print(f"{stop}; run the same command to go on from there", style="yellow", highlight=False, soft_wrap=True)
        raise typer.Exit(130) from None


@contextmanager
def progress_bars() -> Iterator[Any]:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("rounds")
    with Progress(*columns, TimeElapsedColumn(), console=err) as bars:
        tasks: dict[str, Any] = {}

        def update(label: str, done: int, total: int) -> None:
            if label not in tasks:
                tasks[label] = bars.add_task(label, total=total)
            bars.update(tasks[label], completed=done)

        yield update


def summarize(run: Any) -> None:
    from perfedrl.experiments.stats import mean_interval

    history = run.history
    parts = [("training agents", history.before, history.after)]
    if history.held_out_after.shape[-1]:
        parts.append(("held-out agents", history.held_out_before, history.held_out_after))
    table = Table("expected return", "before adaptation", "after adaptation", title=run.folder.name)
    for label, before, after in parts:
        values = (mean_interval(x[:, -1].mean(axis=-1)) for x in (before, after))
        table.add_row(label, *map(interval, values))
    out.print(table)
    out.print(
        f"cost per agent: {history.trajectories[-1]} trajectories, {history.bytes[-1]} bytes sent and received; "
        f"{run.provenance['seconds']:.1f} s on {run.provenance['device']}",
        highlight=False,
    )
    out.print(f"saved in {run.folder}", highlight=False)


def print_claims(claims: list[Any], seeds: int) -> None:
    table = Table("experiment", "claim", "paper", "measured", "95 % interval", "met", title=f"{seeds} seeds")
    for c in claims:
        met = "[green]yes[/]" if c.met else "[red]no[/]"
        table.add_row(c.experiment, c.claim, f"{c.paper:g}", f"{c.measured:.3f}", f"{c.low:.3f} .. {c.high:.3f}", met)
    out.print(table)
    out.print(f"{sum(c.met for c in claims)} of {len(claims)} claims met", highlight=False)


def interval(x: Any) -> str:
    return f"{x.mean:.3f} ({x.low:.3f} .. {x.high:.3f})"


def main() -> None:
    """The entry point: a user's mistake is one sentence and exit code 2."""
    try:
        sys.exit(app(standalone_mode=False))  # what a command leaves with typer.Exit comes back as a number
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except UserError as error:
        err.print(f"error: {error}", style="red", highlight=False, soft_wrap=True)
        sys.exit(2)
    except Exception as error:
        if not hasattr(error, "format_message"):  # what the parser raises for a wrong option or command has it
            raise
        err.print(f"error: {error.format_message()}", style="red", highlight=False, soft_wrap=True)
        sys.exit(2)
