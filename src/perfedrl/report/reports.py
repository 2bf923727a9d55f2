"""Which page goes with which work: a run, the demonstration, a reproduction of the paper."""

from collections.abc import Mapping, Sequence

from perfedrl.experiments import demo
from perfedrl.experiments.paper import Claim, Experiment, neural
from perfedrl.experiments.stats import mean_interval
from perfedrl.experiments.store import Run
from perfedrl.report import figures, page, tables
from perfedrl.report.plots import ORANGE, PINK, Axis, Lines, Plot, Series


def of_run(run: Run, command: str) -> page.Report:
    """One run: its config, its returns, its curves."""
    history, config = run.history, run.config
    rows = [("training agents", history.before, history.after)]
    if history.held_out_after.shape[-1]:
        rows.append(("held-out agents", history.held_out_before, history.held_out_after))
    body = [
        (label, *(tables.interval(mean_interval(x[:, -1].mean(axis=-1))) for x in (before, after)))
        for label, before, after in rows
    ]
    result = page.Table("Expected return", ("", "before adaptation", "after adaptation"), body)
    return page.Report(
        title=f"Run {run.folder.name}",
        summary=f"{config.algorithm['name']} on {config.parts.fleet.agents} agents of {config.fleet['env']}: one "
        "shared initialization, measured before and after each agent's own step. Intervals: 95 %, over seeds.",
        command=command,
        facts=about(run) | {"settings": settings(run)},
        tables=[result],
        plots=figures.learning(run),
        runs=[run],
    )


def of_demo(runs: Mapping[str, Run], command: str) -> page.Report:
    """The demonstration: unseen agents, personalized and from scratch."""
    rows = demo.rows(runs)
    meta, scratch = runs[neural.META], runs[neural.SCRATCH_SHOWN]
    header = ("trajectories", "return, personalized", "success", "return, from scratch", "success")
    result = page.Table(
        "What an unseen agent gets",
        header,
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
        plots=demo_plots(runs),
        runs=[meta, scratch],
    )


def demo_plots(runs: Mapping[str, Run]) -> list[Plot]:
    meta, scratch = runs[neural.META].deployed, runs[neural.SCRATCH_SHOWN].history
    alone = scratch.outcomes["after.success"].mean(axis=-1)
    series = (
        Series("meta-initialization, one step", meta.budgets, meta.outcomes["success"].mean(axis=-1), ORANGE),
        Series("from scratch", scratch.trajectories, alone, PINK),
    )
    axis, y_label = Axis.budgets(figures.NEW_AGENT, meta.budgets), "success rate on unseen goals"
    curve = Lines("success", "Success of unseen agents by what they spend", axis, y_label, series, percent=True)
    return [curve, *figures.rollouts(runs), *figures.learning(runs[neural.META])[:1]]


def of_reproduction(
    experiments: Sequence[Experiment],
    seeds: int,
    claims: Sequence[Claim],
    plots: Sequence[Plot],
    runs: Sequence[Run],
    command: str,
) -> page.Report:
    """Experiments of the paper: every claim beside ours, and the figures."""
    names = "; ".join(f"{e.name}: {e.title}" for e in experiments)
    return page.Report(
        title="The paper's experiments, reproduced",
        summary=f"{sum(c.met for c in claims)} of {len(claims)} claims met with {seeds} seeds. Every number stands "
        "beside the paper's, with its 95 % interval over seeds.",
        command=command,
        facts={"experiments": names, **about(runs[-1])},
        tables=[page.claims(claims)],
        plots=plots,
        runs=runs,
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
