"""What an agent reports of its environment: sizes and names, from which a server builds policy and algorithm.

An environment that is played in Python (Gymnasium, a robot) is on its agent's machine only. A server gets reports
instead, and an agent builds a run on the report that the server's plan holds. Reports come over a network: every number
and name is checked before it is used.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import jax
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from perfedrl.envs import ENVS, Fleet, PlayedTask, fleet, played_in_python
from perfedrl.envs.base import LONGEST_HORIZON, made_up_episodes
from perfedrl.envs.gym.fleet import training_agents
from perfedrl.errors import UserError
from perfedrl.experiments.config import Config
from perfedrl.policies.mlp import WIDEST, observation_size
from perfedrl.simulation.evaluation import episode_outcomes
from perfedrl.types import Sampler, Trajectory

PLAN_TABLE = "environment"
"""The table of a plan that holds the report."""
LONGEST_REPORT, MOST_COMPONENTS, MOST_OUTCOMES = 10_000, 1024, 30
OUTCOME_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 _-]{0,39}")

Size = Annotated[int, Field(ge=1, le=WIDEST)]


class EnvironmentReport(BaseModel):
    """The spaces, the length of episodes, the discount and the outcomes of an agent's environment."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    observation_size: Size
    actions: Size | Annotated[tuple[Size, ...], Field(min_length=1, max_length=MOST_COMPONENTS)] | None = None
    action_size: Size | None = None
    horizon: int = Field(ge=0, le=LONGEST_HORIZON)
    discount: float = Field(ge=0, lt=1)
    outcomes: tuple[str, ...] = Field(default=(), max_length=MOST_OUTCOMES)
    """Names of what is measured beside the return, sorted."""

    def fits(self, other: "EnvironmentReport") -> bool:
        """Whether agents with these reports can train together; their outcomes may differ."""
        return self.model_copy(update={"outcomes": other.outcomes}) == other

    def __str__(self) -> str:
        acts = f"{self.actions} actions" if self.action_size is None else f"actions of length {self.action_size}"
        return (
            f"observations of length {self.observation_size}, {acts}, horizon {self.horizon} and "
            f"discount {self.discount:g}"
        )

    def table(self) -> dict[str, Any]:
        """The report as a table of a plan."""
        return self.model_dump(mode="json", exclude_none=True)

    def fleet(self, agents: int) -> Fleet:
        """A fleet of so many agents of which only the report is known."""
        return fleet([ReportedTask(self)] * agents)


@dataclass(frozen=True)
class ReportedTask(PlayedTask):
    """An agent on another machine: its sizes and outcomes are known, but it cannot be played here."""

    report: EnvironmentReport

    @property
    def horizon(self) -> int:
        return self.report.horizon

    @property
    def discount(self) -> float:
        return self.report.discount

    @property
    def observation_size(self) -> int:
        return self.report.observation_size

    @property
    def actions(self) -> int | tuple[int, ...] | None:
        return self.report.actions

    @property
    def action_size(self) -> int | None:
        return self.report.action_size

    def sampler(self, policy: Any) -> Sampler:
        """Raise an error: only the agent itself can play."""
        raise UserError("this agent's environment is on its own machine, and cannot be played here")

    def outline(self, m: int) -> Trajectory:
        """Return m made-up episodes of the right shapes and types."""
        spaces = self.report
        return made_up_episodes(m, spaces.horizon, spaces.observation_size, spaces.actions, spaces.action_size)


def report_of(tasks: Any) -> EnvironmentReport:
    """Describe an agent's environment, given as a stack of one task; nothing is played."""
    task = jax.tree.map(lambda x: x[0], tasks)
    size = observation_size(Fleet(tasks), "mlp")
    spaces = int(task.horizon), size, task.actions, task.action_size

    def outcomes() -> Any:
        return episode_outcomes(task, made_up_episodes(1, *spaces))

    names = set(jax.eval_shape(outcomes)) - {"return"}
    about = zip(("horizon", "observation_size", "actions", "action_size"), spaces, strict=True)
    return checked_report({**dict(about), "discount": float(task.discount), "outcomes": sorted(names)})


def checked_report(table: Mapping[str, Any]) -> EnvironmentReport:
    """Check a report from an agent or a plan; the error is one sentence."""
    try:
        text = json.dumps(dict(table))
        if len(text) > LONGEST_REPORT:
            raise UserError(f"expected a report of at most {LONGEST_REPORT} characters, got {len(text)}")
        report = EnvironmentReport.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UserError(
            f"the report of the environment: {where}: {first['msg'][0].lower()}{first['msg'][1:]}"
        ) from error
    except (TypeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError("the report of the environment is not a table of numbers and names") from error
    if (report.actions is None) == (report.action_size is None):
        raise UserError("the report of the environment must have either actions or action_size")
    if not all(OUTCOME_NAME.fullmatch(name) for name in report.outcomes):
        raise UserError("outcomes in the report of the environment must have names of 1 to 40 letters and digits")
    return report


def parsed_report(text: str) -> EnvironmentReport:
    """Parse an agent's report, which is JSON."""
    try:
        table = json.loads(text[: LONGEST_REPORT + 1])
    except (ValueError, RecursionError) as error:
        raise UserError("the report of the environment is not valid JSON") from error
    if not isinstance(table, dict):
        raise UserError("the report of the environment is not a table of numbers and names")
    return checked_report(table)


def agents_bring_environments(config: Config) -> bool:
    """Whether a config's agents play in Python: then only they have the environment, and a server has their report."""
    env = config.fleet["env"]
    return played_in_python(config.fleet) or (env not in ENVS and not config.experiment.fleet.traceable)


def agents_of(config: Config) -> int:
    """The number of agents that train; where agents bring their environments, none is made to find it out."""
    return training_agents(config.fleet) if played_in_python(config.fleet) else config.experiment.fleet.agents


def with_report(config: Config, report: EnvironmentReport) -> Config:
    """A config whose experiment is built on a report instead of an environment."""
    return config.with_fleet(report.fleet(agents_of(config)))
