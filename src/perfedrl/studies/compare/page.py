"""The report page of comparisons."""

from collections.abc import Sequence

from perfedrl.report import page
from perfedrl.studies.compare import Comparison, figures, tables


def comparisons_page(found: Sequence[Comparison], command: str) -> page.Report:
    """The page of some comparisons: the best methods, all measures, tuning and costs, and the figures."""
    best = tables.winners(found, "training")
    said = "; ".join(f"{fleet}: {method}, {interval.mean:.3f}" for fleet, method, interval in best)
    made = next(iter(found[0].entries.values())).made
    shown = [
        table
        for comparison in found
        for table in (
            *tables.results(comparison),
            tables.differences(comparison),
            tables.tuned(comparison),
            tables.absent(comparison),
        )
        if table.rows
    ]
    return page.Report(
        title="Personalization mechanisms at matched budgets",
        summary=f"The best for training agents after personalization: {said}.",
        command=command,
        facts={"made on": f"{made['device']}, {made['finished'][:10]}", "versions": f"perfedrl {made['perfedrl']}"},
        tables=shown,
        plots=[*figures.summary(found), *(plot for one in found for plot in figures.details(one))],
    )
