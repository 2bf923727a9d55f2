"""Commands that train several runs to show something: the demonstration and the paper's experiments."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from perfedrl import compilation, studies
from perfedrl.cli.console import (
    Cache,
    ReportFile,
    Restart,
    RunsFolder,
    as_json,
    command_line,
    measuring,
    out,
    training,
    wrote,
)
from perfedrl.errors import UserError, nearest
from perfedrl.experiments.files import check_file, check_folder, write_atomically
from perfedrl.experiments.training import saved
from perfedrl.experiments.training import train as train_configs
from perfedrl.report import tables
from perfedrl.studies import demonstration as demonstration

GROUPS = {"all": list(studies.EXPERIMENTS), "families": list(studies.FAMILIES), "mechanisms": list(studies.MECHANISMS)}
NAMES = "; ".join(f"{', '.join(members)}, or {group}" for group, members in GROUPS.items()) + "."


def demo(
    seeds: Annotated[int, typer.Option(min=1, help="How many times to repeat it.")] = demonstration.SEEDS,
    report: Annotated[Path, typer.Option(help="Where the report page goes.")] = Path("demo.html"),
    runs: RunsFolder = Path("runs"),
    restart: Restart = False,
    compile_cache: Cache = True,
) -> None:
    """See it work, in about a minute: train a fleet, then personalize agents that never took part.

    Six agents with goals on an arc learn one initialization together; three unseen agents turn it into their own
    policies from 20, 100 and 200 trajectories, beside learning from scratch at the same cost.
    """
    from perfedrl.report import page  # the drawing libraries are slow to import
    from perfedrl.studies import reports

    check_file(report)
    compilation.use_all_cores()
    configs = demonstration.configs(seeds)
    done = train_all(list(configs.values()), runs, restart, compile_cache)
    trained = dict(zip(configs, done, strict=True))
    out.print(tables.demo(demonstration.rows(trained), seeds))
    out.print(tables.cost(done[0]), highlight=False, soft_wrap=True)
    wrote([page.write(reports.of_demo(trained, command_line()), report)])


def reproduce(
    experiments: Annotated[list[str], typer.Argument(help=NAMES, metavar="EXPERIMENT...")],
    quick: Annotated[
        bool, typer.Option("--quick", help="A faithful miniature: fewer seeds, smaller curvature batches.")
    ] = False,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="How many seeds; as many as each is meant for when left out, 10 or 20.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the claims to this file.")] = None,
    report: ReportFile = None,
    figures: Annotated[Path, typer.Option(help="Where the figures go.")] = Path("figures"),
    runs: RunsFolder = Path("runs"),
    only_saved: Annotated[bool, typer.Option("--saved", help="Train nothing: use the runs that are there.")] = False,
    restart: Restart = False,
    compile_cache: Cache = True,
) -> None:
    """Repeat experiments, the paper's and those beyond it: train what is missing, check claims, draw the figures.

    Examples: perfedrl reproduce e1 --quick; perfedrl reproduce all --json claims.json --report report.html
    """
    from perfedrl.report import page, static  # the drawing libraries are slow to import
    from perfedrl.studies import reports

    chosen = [choose(name) for name in expand(experiments)]
    check_folder(figures)
    for file in (json_file, report):
        if file:
            check_file(file)
    compilation.use_all_cores()
    configs = studies.all_configs(chosen, seeds, quick)
    trained = saved(configs, runs) if only_saved else train_all(configs, runs, restart, compile_cache)
    kept = studies.Kept(runs, only_saved, restart)
    claims, plots = findings(chosen, seeds, quick, trained, kept)
    out.print(tables.claims(claims, trained))
    written = [path for plot in plots for path in static.save(plot, figures)]
    if json_file:
        write_atomically(json_file, as_json([asdict(claim) for claim in claims]))
        written.append(json_file)
    if report:
        written.append(page.write(reports.of_reproduction(chosen, claims, plots, trained, command_line()), report))
    wrote(written)


def train_all(configs: list[Any], runs: Path, restart: bool, compile_cache: bool) -> list[Any]:
    """The runs of some configs, trained where they are missing."""
    with training(restart) as observers:
        return train_configs(configs, runs, restart=restart, observers=observers, compile_cache=compile_cache)


def findings(
    chosen: list[Any], seeds: int | None, quick: bool, trained: list[Any], kept: studies.Kept
) -> tuple[list[Any], list[Any]]:
    """The claims and the figures of some experiments, from all their runs and what is kept beside them."""
    from perfedrl.studies.figures import FIGURES

    run_of = {run.config.folder: run for run in trained}
    claims, plots = [], []
    for experiment in chosen:
        repeats = studies.seeds_of(experiment, seeds, quick)
        wanted = experiment.configs(repeats, quick)
        done = {key: run_of[config.folder] for key, config in wanted.items()}
        with measuring(experiment.name) as progress:
            arrays = kept(experiment.name, experiment.kept(repeats), progress)
            evidence = experiment.measure({**done, **arrays}, progress)
        claims += experiment.claims(evidence)
        plots += FIGURES[experiment.name](evidence)
    return claims, plots


def expand(names: list[str]) -> list[str]:
    """The experiments that some names stand for, once each."""
    return list(dict.fromkeys(one for name in names for one in GROUPS.get(name, [name])))


def choose(name: str) -> Any:
    if name not in studies.KNOWN:
        raise UserError(f"unknown experiment {name!r}{nearest(name, [*studies.KNOWN, *GROUPS])}")
    return studies.KNOWN[name]
