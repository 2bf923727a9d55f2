"""The choice of one agent: by its number, by the settings of a new one, or as a task of one's own."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from perfedrl.envs import Fleet
from perfedrl.envs.base import check_task
from perfedrl.envs.new_agents import format_value
from perfedrl.errors import UserError
from perfedrl.experiments.store import Run
from perfedrl.policies.sighted import sighted_task
from perfedrl.simulation.evaluation import check_fit


class ChosenAgent(NamedTuple):
    """An agent's name, which its random numbers depend on, its task, and the choice as it stands in a policy's file."""

    name: str
    task: Any
    choice: dict[str, Any]
    warnings: Sequence[str] = ()


def choose_agent(
    run: Run,
    goal: Sequence[float] | None = None,
    agent: int | None = None,
    task: Any = None,
    settings: Mapping[str, Any] | None = None,
) -> ChosenAgent:
    """Return the agent that the caller selected."""
    fleet, chosen = run.config.experiment.fleet, [x for x in (goal, agent, task, settings) if x is not None]
    if len(chosen) != 1 and not (len(chosen) == 2 and agent is not None and settings is not None):
        raise UserError(which_agent(fleet))
    if agent is not None:
        check_number(fleet, agent)
    if settings is not None and not isinstance(settings, Mapping):
        raise UserError(f"settings must be a dict of names and values, got {settings!r}")
    if goal is not None:
        settings = {"goal": goal}
    if settings is not None:
        return from_settings(run, settings, agent)
    if agent is not None:
        return numbered(fleet, agent)
    check_task(task, "the task")
    if fleet.sight is not None:
        task = sighted_task(task, fleet.sight)
    check_fit(task, run.config.experiment.policy)
    return ChosenAgent("own task", task, {})


def which_agent(fleet: Fleet) -> str:
    """The error where no agent, or more than one, was selected; it lists what can be set."""
    family = fleet.new_agents
    new = "" if family is None else f"; a new agent has the settings {family.describe()}"
    return (
        "say which agent, by only one of these: its number, the settings of a new one (also of a numbered agent with "
        f"some changed), a goal, or in Python a task{new}"
    )


def check_number(fleet: Fleet, agent: int) -> None:
    """Reject a number that no agent has."""
    if not 0 <= agent < fleet.agents + fleet.held_out_agents:
        raise UserError(
            f"there is no agent {agent}: training agents are 0 to {fleet.agents - 1}"
            + (f", held-out ones go on to {fleet.agents + fleet.held_out_agents - 1}" if fleet.held_out else "")
        )


def numbered(fleet: Fleet, agent: int) -> ChosenAgent:
    """An agent of the fleet."""
    part, family = "training" if agent < fleet.agents else "held out", fleet.new_agents
    far = family.warnings(family.agents[agent], fleet.agents) if family is not None else []
    return ChosenAgent(f"agent {agent} ({part})", fleet.agent(agent), {"agent": agent}, far)


def from_settings(run: Run, settings: Mapping[str, Any], like: int | None) -> ChosenAgent:
    """A new agent of the run's family; settings that are not given are those of agent `like`."""
    fleet = run.config.experiment.fleet
    family = fleet.new_agents
    if family is None:
        raise UserError(f"the agents of {run.folder.name} have nothing that can be set; name one of them by its number")
    task = family.task(fleet, settings, like)
    check_fit(task, run.config.experiment.policy)
    name = ", ".join(f"{key} {format_value(value, digits=6)}" for key, value in settings.items())
    choice = {"settings": dict(settings)} | ({} if like is None else {"agent": like})
    named = name if like is None else f"agent {like} with {name}"
    return ChosenAgent(named, task, choice, family.warnings(settings, fleet.agents))
