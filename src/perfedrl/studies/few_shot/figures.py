"""Figures of the few-shot study: return and success by budget, and episodes of an unseen agent."""

from perfedrl.report.plots import BLUE, GREY, ORANGE, PINK, Axis, Level, Lines, Panel, Plot, Rollouts, Series
from perfedrl.studies.base import Runs
from perfedrl.studies.few_shot.study import BASELINES_ONLY, HELD_OUT_BEST, RECOMMENDED
from perfedrl.studies.paper_neural.study import META, SHOWN_AGENT


def few_shot(runs: Runs) -> list[Plot]:
    """Return and success of held-out agents by budget: as in the paper, with baselines, and as recommended."""
    named = {
        META: ("first-order, as in the paper", GREY),
        BASELINES_ONLY: ("the same with baselines", ORANGE),
        RECOMMENDED: ("recommended", BLUE),
    }
    plots: list[Plot] = []
    for outcome, label in (("return", "return"), ("success", "success rate")):
        rate = outcome == "success"
        series = tuple(
            Series(name, runs[key].deployed.budgets, runs[key].deployed.outcomes[outcome].mean(axis=-1), color)
            for key, (name, color) in named.items()
        )
        levels = () if rate else (Level("optimum", HELD_OUT_BEST, PINK),)
        axis = Axis.budgets("trajectories of the new agent", runs[META].deployed.budgets)
        title, seeds = f"Few-shot {label} on unseen agents", tuple(runs[META].config.seeds)
        plots.append(
            Lines(f"fewshot-{outcome}", title, axis, f"{label} on held-out goals", series, seeds, levels, percent=rate)
        )
    return [*plots, rollouts(runs)]


def rollouts(runs: Runs) -> Rollouts:
    """Episodes of an unseen agent with the recommended initialization, before and after its step."""
    run = runs[RECOMMENDED]
    task = run.config.experiment.fleet.task(SHOWN_AGENT, held_out=True)
    at = {int(m): run.deployed.rollouts[0, i, SHOWN_AGENT] for i, m in enumerate(run.deployed.budgets)}
    titles = {0: "before adaptation", 20: "after one step from 20 trajectories", 200: "from 200 trajectories"}
    panels = tuple(Panel(title, at[m], task.goal, task.radius) for m, title in titles.items())
    return Rollouts("fewshot-rollouts", "Episodes on an unseen goal, as recommended", panels, task.box)
