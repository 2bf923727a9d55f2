"""Which page goes with which work: a run, the demonstration, a reproduction of the paper."""

from collections.abc import Mapping, Sequence

from perfedrl.experiments.store import Run
from perfedrl.report import page, tables
from perfedrl.report.plots import Plot
from perfedrl.studies import Claim, Experiment, demonstration, figures
from perfedrl.studies.compare import Comparison
from perfedrl.studies.compare import figures as compare_figures
from perfedrl.studies.compare import tables as compare_tables
from perfedrl.studies.paper_neural import study as paper_neural_study


def of_run(run: Run, command: str) -> page.Report:
    """One run: its config, its returns, its curves."""
    config = run.config
    result = page.Table("Result", ("", "before adaptation", "after adaptation"), tables.final_outcomes(run))
    return page.Report(
        title=f"Run {run.folder.name}",
        summary=f"{config.algorithm['name']} on {config.experiment.fleet.agents} agents of {config.fleet['env']}: one "
        "shared initialization, measured before and after each agent's own step. Intervals: 95 %, over seeds.",
        command=command,
        facts=about(run) | {"settings": settings(run)},
        tables=[result],
        plots=figures.learning(run),
        runs=[run],
    )


def of_demo(runs: Mapping[str, Run], command: str) -> page.Report:
    """The demonstration: unseen agents, personalized and from scratch."""
    rows = demonstration.rows(runs)
    meta, scratch = runs[paper_neural_study.META], runs[paper_neural_study.SCRATCH_SHOWN]
    result = page.Table(
        "What an unseen agent gets",
        tables.DEMO_HEADER,
        [tables.demo_cells(row) for row in rows],
        note="Mean over three agents that took no part in training and over seeds. The best possible return is 4.32.",
    )
    first, last = rows[0], rows[-1]
    return page.Report(
        title="Personalized federated reinforcement learning, demonstrated",
        summary=f"Six agents with goals on an arc learned one policy initialization together. An agent that never took "
        f"part reaches its goal in {first.personalized_success.mean:.0%} of episodes with it as it is, and in "
        f"{last.personalized_success.mean:.0%} after one policy-gradient step from {last.trajectories} trajectories; "
        f"learning from scratch with as many reaches it in {last.scratch_success.mean:.0%}.",
        command=command,
        facts=about(meta),
        tables=[result],
        plots=[
            figures.by_budget("success", "success", meta, scratch),
            *figures.rollouts(runs),
            figures.learning(meta)[0],
        ],
        runs=[meta, scratch],
    )


def of_reproduction(
    experiments: Sequence[Experiment],
    claims: Sequence[Claim],
    plots: Sequence[Plot],
    runs: Sequence[Run],
    command: str,
) -> page.Report:
    """Experiments of the paper: every claim beside ours, and the figures."""
    names = "; ".join(f"{e.name}: {e.title}" for e in experiments)
    return page.Report(
        title="The paper's experiments, reproduced",
        summary=f"{sum(c.met for c in claims)} of {len(claims)} claims met. Every number stands beside the paper's"
        + (f", those of runs with their 95 % interval over {tables.seeds(runs)}." if runs else "."),
        command=command,
        facts={"experiments": names, **(about(runs[-1]) if runs else {})},
        tables=[page.claims(claims)],
        plots=plots,
        runs=runs,
    )


def of_comparisons(found: Sequence[Comparison], command: str) -> page.Report:
    """Mechanisms side by side: who wins where, every measure, what was tuned and what it cost."""
    best = compare_tables.winners(found, "training")
    said = "; ".join(f"{fleet}: {method}, {interval.mean:.3f}" for fleet, method, interval in best)
    made = next(iter(found[0].entries.values())).made
    tables_ = [
        table
        for comparison in found
        for make in (
            compare_tables.results,
            compare_tables.differences,
            compare_tables.tuned,
            compare_tables.absent,
        )
        if (table := make(comparison)).rows
    ]
    return page.Report(
        title="Personalization mechanisms at matched budgets",
        summary=f"The best for training agents after personalization: {said}.",
        command=command,
        facts={"made on": f"{made['device']}, {made['finished'][:10]}", "versions": f"perfedrl {made['perfedrl']}"},
        tables=tables_,
        plots=[*compare_figures.summary(found), *(plot for one in found for plot in compare_figures.details(one))],
    )


def about(run: Run) -> dict[str, str]:
    """Where a run came from."""
    p = run.provenance
    versions = f"perfedrl {p['perfedrl']}, JAX {p['jax']}, Python {p['python']}"
    return {
        "made on": f"{p['device']}, {p['finished'][:10]}",
        "versions": versions,
        "commit": p.get("commit") or "an installed package",
    }


def settings(run: Run) -> str:
    """A config's algorithm in one line."""
    config = run.config
    parts = {k: v for k, v in config.algorithm.items() if k != "name"}
    return ", ".join([f"{config.rounds} rounds", *(f"{k} = {v}" for k, v in parts.items())])
