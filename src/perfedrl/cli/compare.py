"""The command `compare`: personalization mechanisms at equal budgets."""

from pathlib import Path
from typing import Annotated

import typer

from perfedrl import compilation
from perfedrl.cli.console import RunsFolder, command_line, out, print_message, print_written, training
from perfedrl.experiments.files import check_file, check_folder
from perfedrl.report import page
from perfedrl.studies.compare import Comparison, NoResultsError, load_plans
from perfedrl.studies.compare import compare as compare_methods
from perfedrl.studies.compare import figures as compare_figures
from perfedrl.studies.compare import tables as compare_tables
from perfedrl.studies.compare.page import comparisons_page


def compare(
    plans: Annotated[list[Path], typer.Argument(help="TOML files with plans of comparisons.")],
    only: Annotated[
        list[str] | None,
        typer.Option(help="Compare this method only, so that processes can share the work; may be repeated."),
    ] = None,
    results: Annotated[Path, typer.Option(help="Folder for the results, one file per method.")] = Path("comparisons"),
    runs: RunsFolder = Path("runs"),
    saved: Annotated[
        bool,
        typer.Option("--saved", help="Train nothing; show the results that are there, also while others are made."),
    ] = False,
    report: Annotated[Path, typer.Option(help="The page that is written, one .html file.")] = Path("comparison.html"),
    figures: Annotated[Path | None, typer.Option(help="Also write the figures to this folder.")] = None,
) -> None:
    """Compare personalization mechanisms on one or several fleets, at equal budgets of trajectories, rounds and tuning.

    Each method tries equally many random settings on agents and seeds that are not tested; the best one is trained on
    the test seeds. Existing results are read, so an interrupted comparison continues where it stopped. A plan's list
    `methods` may have algorithms of your own, such as "mine:FedProx" in the file mine.py beside the plan.

    Examples: perfedrl compare configs/compare/gridworld.toml; perfedrl compare configs/compare/*.toml --saved
    --results results/compare
    """
    check_file(report)
    if figures:
        check_folder(figures)
    compilation.use_all_cores()
    checked = [plan for path in plans for plan in load_plans(path)]
    found: list[Comparison] = []
    absent: list[NoResultsError] = []
    with training(restart=False) as observers:
        for plan in checked:
            try:
                found.append(compare_methods(plan, results, runs, only=only or (), saved=saved, observers=observers))
            except NoResultsError as error:
                absent.append(error)
    if not found:
        raise absent[0]
    for reason in absent:
        print_message(f"left out: {reason}", "yellow")
    show(found, report, figures)


def show(found: list[Comparison], report: Path, figures: Path | None) -> None:
    """Print the tables, and write the page and the figures."""
    from perfedrl.report import static  # imports matplotlib, which is slow to import

    for comparison in found:
        out.print(compare_tables.terminal(comparison))
        out.print(comparison.origin, highlight=False, soft_wrap=True)
    written = [page.write(comparisons_page(found, command_line()), report)]
    if figures:
        plots = compare_figures.summary(found) + (compare_figures.details(found[0]) if len(found) == 1 else [])
        written += [path for plot in plots for path in static.save(plot, figures)]
    print_written(written)
