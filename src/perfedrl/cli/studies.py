"""The commands `demo` and `reproduce`, which train the runs of a demonstration or of studies."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from perfedrl import compilation
from perfedrl.cli import console
from perfedrl.experiments.files import check_file, check_folder, write_atomically
from perfedrl.experiments.training import saved
from perfedrl.experiments.training import train as train_configs
from perfedrl.report import page, tables
from perfedrl.studies import GROUPS, claims, demonstration, reproduction
from perfedrl.studies.measurement_cache import MeasurementCache

NAMES = "; ".join(f"{', '.join(members)}, or {group}" for group, members in GROUPS.items()) + "."


def demo(
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds.")] = demonstration.SEEDS,
    report: Annotated[Path, typer.Option(help="The report page that is written.")] = Path("demo.html"),
    runs: console.RunsFolder = Path("runs"),
    restart: console.Restart = False,
    compile_cache: console.Cache = True,
) -> None:
    """Train a fleet and personalize unseen agents, in about a minute.

    Six agents with goals on an arc learn one initialization together. Three unseen agents turn it into their own
    policies from 20, 100 and 200 trajectories; the table also shows the worst of the three, and learning from scratch
    at the same cost. A second table shows every agent, and which of them lose by their step.
    """
    check_file(report)
    compilation.use_all_cores()
    configs = demonstration.configs(seeds)
    done = train_all(list(configs.values()), runs, restart, compile_cache)
    trained = dict(zip(configs, done, strict=True))
    meta = trained[demonstration.META]
    with console.status_line("measuring every agent"):
        agents = demonstration.agent_rows(meta)
    console.out.print(demonstration.terminal_table(demonstration.rows(trained), seeds))
    console.out.print(demonstration.agents_table(agents, meta))
    console.out.print(f"{tables.cost(meta)}\n{tables.origins(done)}", highlight=False, soft_wrap=True)
    content = demonstration.demonstration_page(trained, agents, console.command_line())
    console.print_written([page.write(content, report)])


def reproduce(
    studies: Annotated[list[str], typer.Argument(help=NAMES, metavar="STUDY...")],
    quick: Annotated[bool, typer.Option("--quick", help="Fewer seeds and smaller curvature batches.")] = False,
    seeds: Annotated[int | None, typer.Option(min=1, help="Number of seeds; by default that of each study.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the claims to this file.")] = None,
    report: console.ReportFile = None,
    figures: Annotated[Path, typer.Option(help="Folder for the figures.")] = Path("figures"),
    runs: console.RunsFolder = Path("runs"),
    only_saved: Annotated[bool, typer.Option("--saved", help="Train nothing; use saved runs only.")] = False,
    restart: console.Restart = False,
    compile_cache: console.Cache = True,
) -> None:
    """Reproduce studies of the paper and beyond it: train missing runs, check claims, draw figures.

    A group leaves out studies whose optional packages are not installed.

    Examples: perfedrl reproduce e1 --quick; perfedrl reproduce all --json claims.json --report report.html
    """
    from perfedrl.report import static  # imports matplotlib, which is slow to import

    chosen = reproduction.choose(studies, tell=lambda sentence: console.print_message(sentence, "yellow"))
    check_folder(figures)
    for file in (json_file, report):
        if file:
            check_file(file)
    compilation.use_all_cores()
    configs = reproduction.all_configs(chosen, seeds, quick)
    trained = saved(configs, runs) if only_saved else train_all(configs, runs, restart, compile_cache)
    cache = MeasurementCache(runs, only_saved, restart)
    found, plots = reproduction.claims_and_figures(chosen, seeds, quick, trained, cache, console.status_line)
    console.out.print(claims.terminal_table(found, trained))
    if trained:
        console.out.print(tables.origins(trained), highlight=False, soft_wrap=True)
    written = [path for plot in plots for path in static.save(plot, figures)]
    if json_file:
        write_atomically(json_file, console.as_json([asdict(claim) for claim in found]))
        written.append(json_file)
    if report:
        content = reproduction.reproduction_page(chosen, found, plots, trained, console.command_line())
        written.append(page.write(content, report))
    console.print_written(written)


def train_all(configs: list[Any], runs: Path, restart: bool, compile_cache: bool) -> list[Any]:
    """Train the configs whose runs are missing and return all runs."""
    with console.training(restart) as observers:
        return train_configs(configs, runs, restart=restart, observers=observers, compile_cache=compile_cache)
