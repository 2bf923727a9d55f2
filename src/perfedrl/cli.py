"""The command line: parse, call, print."""

import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from perfedrl import compilation
from perfedrl.algorithms import ALGORITHMS
from perfedrl.envs import ENVS
from perfedrl.errors import UserError, nearest
from perfedrl.estimators import CURVATURES
from perfedrl.experiments import paper, store
from perfedrl.experiments.config import load_config
from perfedrl.experiments.evaluate import evaluate as evaluate_run
from perfedrl.experiments.run import Interrupted
from perfedrl.experiments.run import train as train_configs
from perfedrl.policies import POLICIES
from perfedrl.report import tables

app = typer.Typer(
    help="Personalized federated reinforcement learning: agents learn one shared initialization together, and each "
    "turns it into its own policy with a single local policy-gradient step.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
out, err = Console(), Console(stderr=True)
INTERRUPTED = 130
"""The exit code after Ctrl-C."""

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
    compilation.use_all_cores()
    checked = load_config(config)
    with training(restart) as progress:
        run = train_configs(checked, runs, restart=restart, chunk=chunk, progress=progress, compile_cache=compile_cache)
    out.print(tables.summary(run))
    out.print(f"{tables.cost(run)}\nsaved in {run.folder}", highlight=False, soft_wrap=True)


@app.command()
def evaluate(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run.")],
    alpha: Annotated[float | None, typer.Option(help="Adapt with this step size instead of the run's own.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the table to this file.")] = None,
) -> None:
    """Evaluate a run's initialization exactly, agent by agent, before and after its adaptation step.

    Example: perfedrl evaluate runs/gridworld-0123456789
    """
    if json_file:
        store.check_file(json_file)
    compilation.use_all_cores()
    rows = evaluate_run(store.load_run(run), alpha)
    out.print(tables.agents(run.name, rows))
    if json_file:
        content = [{**row._asdict(), "before": row.before._asdict(), "after": row.after._asdict()} for row in rows]
        store.write_atomically(json_file, as_json(content))


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
    from perfedrl.report.figures import draw  # matplotlib is slow to import and only needed here

    chosen = [choose(name, paper.EXPERIMENTS) for name in expand(experiments, paper.EXPERIMENTS)]
    count = seeds or (paper.QUICK_SEEDS if quick else paper.SEEDS)
    store.check_folder(figures)
    if json_file:
        store.check_file(json_file)
    compilation.use_all_cores()
    configs = paper.all_configs(chosen, count)
    with training(restart) as progress:
        trained = train_configs(configs, runs, restart=restart, progress=progress, compile_cache=compile_cache)
    run_of = dict(zip((config.folder for config in configs), trained, strict=True))
    claims, written = [], []
    for experiment in chosen:
        done = {key: run_of[config.folder] for key, config in experiment.configs(count).items()}
        claims += experiment.claims(done)
        written += draw(experiment.name, experiment.title, done, figures)
    out.print(tables.claims(claims, count))
    if json_file:
        store.write_atomically(json_file, as_json([asdict(claim) for claim in claims]))
        written.append(json_file)
    out.print("wrote " + ", ".join(map(str, written)), highlight=False, soft_wrap=True)


@app.command(name="list")
def list_(
    kind: Annotated[Kind, typer.Argument(help="What to list.")] = Kind.runs,
    runs: RunsFolder = Path("runs"),
) -> None:
    """List finished runs, or the parts that a config can name, with their parameters."""
    if kind is Kind.runs:
        table = tables.runs(readable(runs))
        out.print(table if table.row_count else f"no finished runs in {runs}")
    elif kind is Kind.experiments:
        out.print(tables.titles(paper.EXPERIMENTS))
    else:
        out.print(tables.parts(registry_of(kind), with_parameters=kind is not Kind.estimators))


def registry_of(kind: Kind) -> Any:
    return {"envs": ENVS, "policies": POLICIES, "estimators": CURVATURES, "algorithms": ALGORITHMS}[kind]


def readable(root: Path) -> Iterator[Any]:
    """The finished runs in a folder; of those that cannot be read it says why."""
    for folder in store.list_runs(root):
        try:
            yield store.load_run(folder)
        except UserError as error:
            say(f"skipped: {error}", "yellow")


def expand(names: list[str], known: Any) -> list[str]:
    return list(known) if "all" in names else list(dict.fromkeys(names))


def choose(name: str, known: Any) -> Any:
    if name not in known:
        raise UserError(f"unknown experiment {name!r}{nearest(name, [*known, 'all'])}")
    return known[name]


@contextmanager
def training(restart: bool) -> Iterator[Any]:
    """A progress bar per group of runs that train together; Ctrl-C ends with how to go on."""
    try:
        with progress_bars() as update:
            yield update
    except Interrupted as stop:
        same = "the same command without --restart" if restart else "the same command"
        say(f"{stop}; run {same} to go on from there", "yellow")
        raise typer.Exit(INTERRUPTED) from None


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


def as_json(rows: list[dict[str, Any]]) -> bytes:
    """Rows as JSON; the open end of an interval, which JSON has no word for, is null."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return (json.dumps([plain(row) for row in rows], indent=2, allow_nan=False) + "\n").encode()


def say(message: str, style: str | None = None) -> None:
    """Print a sentence to the error output, as it is: brackets in it are no markup."""
    err.print(message, style=style, highlight=False, markup=False, soft_wrap=True)


def leave_at_once() -> NoReturn:
    """End the process without tidying up: JAX crashes when it is torn down while it compiles in another thread."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(INTERRUPTED)


def main() -> None:
    """The entry point: a user's mistake is one sentence and exit code 2."""
    try:
        code = app(standalone_mode=False)  # what a command leaves with typer.Exit comes back as a number
        if code == INTERRUPTED:
            leave_at_once()
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
