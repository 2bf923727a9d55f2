"""The report page of one run."""

from perfedrl.experiments.store import Run
from perfedrl.report import page, tables
from perfedrl.report.run_figures import learning


def run_page(run: Run, command: str) -> page.Report:
    """The page of one run: its settings, its final returns and its figures."""
    config = run.config
    result = page.PageTable("Result", ("", "before adaptation", "after adaptation"), tables.final_outcomes(run))
    return page.Report(
        title=f"Run {run.folder.name}",
        summary=f"{config.algorithm['name']} on {config.experiment.fleet.agents} agents of {config.fleet['env']}: one "
        "shared initialization, measured before and after each agent's own step. Intervals: 95 %, over seeds.",
        command=command,
        facts=provenance_facts(run) | {"settings": settings(run)},
        tables=[result],
        plots=learning(run),
        runs=[run],
    )


def provenance_facts(run: Run) -> dict[str, str]:
    """Device, date, versions and commit of a run."""
    p = run.provenance
    versions = f"perfedrl {p['perfedrl']}, JAX {p['jax']}, Python {p['python']}"
    return {
        "made on": f"{p['device']}, {p['finished'][:10]}",
        "versions": versions,
        "commit": p.get("commit") or "an installed package",
    }


def settings(run: Run) -> str:
    """The number of rounds and the algorithm's settings in one line."""
    config = run.config
    parts = {k: v for k, v in config.algorithm.items() if k != "name"}
    return ", ".join([f"{config.rounds} rounds", *(f"{k} = {v}" for k, v in parts.items())])
