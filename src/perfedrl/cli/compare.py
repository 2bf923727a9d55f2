"""The command that holds personalization mechanisms against each other."""

from pathlib import Path
from typing import Annotated

import typer

from perfedrl import compilation
from perfedrl.cli.console import RunsFolder, command_line, out, training, wrote
from perfedrl.experiments.files import check_file, check_folder
from perfedrl.studies import compare as study


def compare(
    plans: Annotated[list[Path], typer.Argument(help="TOML files that say what to compare.")],
    only: Annotated[
        list[str] | None, typer.Option(help="These methods only; several processes may share the work. Repeatable.")
    ] = None,
    results: Annotated[Path, typer.Option(help="Where results are kept, a file per method.")] = Path("comparisons"),
    runs: RunsFolder = Path("runs"),
    saved: Annotated[bool, typer.Option("--saved", help="Train nothing: read what is there.")] = False,
    report: Annotated[Path, typer.Option(help="The page that is written, one .html file.")] = Path("comparison.html"),
    figures: Annotated[Path | None, typer.Option(help="Also write the figures to this folder.")] = None,
) -> None:
    """Compare personalization mechanisms on one fleet or several, at one budget of trajectories, rounds and tuning.

    Every method tries as many settings, drawn at random, on agents and seeds that the test never sees; the best is
    trained on the test seeds. What is already there is read, so an interrupted comparison goes on where it stood.

    Examples: perfedrl compare configs/compare/gridworld.toml; perfedrl compare configs/compare/*.toml --saved
    --results results/compare
    """
    check_file(report)
    if figures:
        check_folder(figures)
    compilation.use_all_cores()
    checked = [plan for path in plans for plan in study.load_plans(path)]
    with training(restart=False) as observers:
        found = [
            study.compare(plan, results, runs, only=only or (), saved=saved, observers=observers) for plan in checked
        ]
    show(found, report, figures)


def show(found: list[study.Comparison], report: Path, figures: Path | None) -> None:
    """Print the tables, write page and figures."""
    from perfedrl.report import page, static
    from perfedrl.studies import reports
    from perfedrl.studies.compare import figures as compare_figures  # slow to import
    from perfedrl.studies.compare import tables as compare_tables

    for comparison in found:
        out.print(compare_tables.terminal(comparison))
    written = [page.write(reports.of_comparisons(found, command_line()), report)]
    if figures:
        plots = compare_figures.summary(found) + (compare_figures.details(found[0]) if len(found) == 1 else [])
        written += [path for plot in plots for path in static.save(plot, figures)]
    wrote(written)
