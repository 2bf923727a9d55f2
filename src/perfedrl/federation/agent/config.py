"""An agent's settings: its environment, its limits, its demands on privacy, and the import paths that it trusts.

A plan, the server's config, comes over a network. What it may import, read and sample on this machine is checked here,
on its text, before anything in it is built.
"""

import math
import tomllib
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import jax
from pydantic import BaseModel, ConfigDict, Field, field_validator

from perfedrl.envs import ENVS, Fleet, Task, fleet, played_in_python
from perfedrl.envs.base import PlayedTask
from perfedrl.envs.gym.fleet import training_agents
from perfedrl.errors import UserError
from perfedrl.experiments.build import AGENT_COUNTS, SEES, Privacy
from perfedrl.experiments.config import Config, parse_config, whole
from perfedrl.experiments.settings import read_table, resolve_fleet_file, validated
from perfedrl.federation.environment_report import (
    PLAN_TABLE,
    EnvironmentReport,
    agents_bring_environments,
    checked_report,
    report_of,
    with_report,
)
from perfedrl.memory import SizeLimits, within
from perfedrl.own_modules import find_modules_in
from perfedrl.policies import Policy
from perfedrl.registry import abbreviated
from perfedrl.rollout import PythonSampler
from perfedrl.saved_policies.spaces import Spaces
from perfedrl.simulation.evaluation import check_fit
from perfedrl.types import Sampler

NAMELESS = "of-each-agent"
"""The Gymnasium id in place of what a plan names: an agent plays in its own environment only."""
LARGEST_NUMBER = 2**31
"""Agents' numbers are smaller, and so differ from the other numbers that are folded into a seed's key."""


class Limits(BaseModel):
    """An agent's limits for one request."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    trajectories_per_round: int = Field(default=100_000, ge=1)
    """For training and for personalization."""
    episodes: int = Field(default=1_000_000, ge=1)
    """For an evaluation, including its adaptation."""
    seconds: float = Field(default=3600.0, gt=0, allow_inf_nan=False)
    """A Python sampler is stopped between two batches; results of longer compiled work are dropped."""
    agents: int = Field(default=10_000, ge=1)
    """Of a plan's fleet, and of its held-out agents: an agent builds both."""
    states: int = Field(default=1_000, ge=1)
    """Of a tabular environment in a plan."""
    parameters: int = Field(default=10_000_000, ge=1)
    """Of a plan's policy."""
    memory: float = Field(default=4.0, gt=0, allow_inf_nan=False)
    """GiB, for building a plan and for each compiled program, as estimated."""
    operations: int = Field(default=20_000, ge=1)
    """Of each program, which bound the time to compile it; the largest of a shipped config has 3,649."""

    @property
    def sizes(self) -> SizeLimits:
        """What building and compiling stay within."""
        return SizeLimits(self.memory * 2**30, self.states, self.operations)

    def check_agents(self, fleet: Mapping[str, Any]) -> None:
        """Reject a plan's fleet of too many agents, before it is built."""
        for name in AGENT_COUNTS:
            count = fleet.get(name)
            if isinstance(count, int) and count > self.agents:
                raise UserError(f"its fleet has {name} = {count}; this agent's limit is agents = {self.agents}")

    def check_parameters(self, policy: Policy) -> None:
        """Reject a policy of too many parameters, before they are drawn."""
        shapes = jax.tree.leaves(jax.eval_shape(policy.init, jax.random.key(0)))
        count = sum(math.prod(x.shape) for x in shapes)
        if count > self.parameters:
            raise UserError(f"its policy has {count} parameters; this agent's limit is parameters = {self.parameters}")


class PrivacyDemands(BaseModel):
    """The table [privacy] of an agent: the least protection of an upload, and a budget for all uploads of its lifetime.

    The budget is an epsilon at a delta, over all rounds and runs.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    least_noise: float = Field(gt=0, allow_inf_nan=False)
    """The least `noise` of a plan, in units of the plan's `clip`."""
    epsilon: float = Field(gt=0, allow_inf_nan=False)
    delta: float = Field(default=1e-5, gt=0, lt=1, allow_inf_nan=False)
    largest_clip: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """The largest `clip` of a plan; by default any, since the privacy loss does not depend on it."""

    def check(self, plan: Privacy | None) -> None:
        """Reject a plan whose uploads are not protected enough."""
        if plan is None:
            raise UserError(
                "it has no table [privacy], and this agent uploads with noise only: ask for noise >= "
                f"{self.least_noise:g}"
            )
        if plan.noise < self.least_noise:
            raise UserError(f"[privacy] noise is {plan.noise:g}; this agent's least_noise is {self.least_noise:g}")
        if self.largest_clip is not None and plan.clip > self.largest_clip:
            raise UserError(f"[privacy] clip is {plan.clip:g}; this agent's largest_clip is {self.largest_clip:g}")


class AgentConfig(BaseModel):
    """One agent of a networked fleet: its environment, its index in that fleet, limits, privacy and trust."""

    model_config = ConfigDict(frozen=True, extra="forbid", ignored_types=(cached_property,))

    fleet: dict[str, Any]
    agent: int | None = Field(default=None, ge=0)
    """The index of the agent in the fleet; by default the only agent, or the agent's number in the federation."""
    folder: str = "."
    """The folder, relative to this file, in which modules of the user's own are looked for."""
    limits: Limits = Limits()
    privacy: PrivacyDemands | None = None
    """What the agent demands of a plan's [privacy]; by default nothing."""
    trust: tuple[str, ...] = ()
    """Import paths that a plan may name; perfedrl's registered names are always allowed."""
    keep: Literal["adapted", "better"] = "adapted"
    """Which policy the agent keeps at the end: the adapted one, or the better of it and the shared one."""
    tell_outcomes: bool | None = None
    """Whether the agent reports its outcomes, which no noise protects; by default it does if it has no [privacy]."""

    @field_validator("fleet")
    @classmethod
    def _fleet(cls, table: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(table.get("env"), str):
            raise UserError(f'the table [fleet] needs env = "...", an import path or one of: {", ".join(ENVS)}')
        params = {key: value for key, value in table.items() if key != "env"}
        return {"env": table["env"], **ENVS.resolve(table["env"], params, supplied=("policy",))}

    @field_validator("trust")
    @classmethod
    def _trust(cls, paths: tuple[str, ...]) -> tuple[str, ...]:
        for path in paths:
            if not all(path.partition(":")):
                raise UserError(f'trust: {abbreviated(path)} is not an import path such as "my_package.policies:net"')
        return paths

    @property
    def tells_outcomes(self) -> bool:
        """Whether the agent reports its outcomes."""
        return self.privacy is None if self.tell_outcomes is None else self.tell_outcomes

    @property
    def env(self) -> str:
        """The name of the environment."""
        return self.fleet["env"]

    @property
    def samples_in_python(self) -> bool:
        """Whether JAX cannot trace the environment, e.g. a Gymnasium fleet or a sampler around a robot."""
        return self.makes_sampler or not as_fleet(self._world).traceable

    @property
    def makes_sampler(self) -> bool:
        """Whether the environment is a function that takes the policy and returns a sampler."""
        return "policy" in ENVS.parameters(self.env)

    @property
    def _params(self) -> dict[str, Any]:
        return {key: value for key, value in self.fleet.items() if key != "env"}

    @cached_property
    def _world(self) -> Any:
        world = ENVS[self.env](**self._params)
        if not isinstance(world, Fleet | Task | PlayedTask):
            raise UserError(
                f"the environment {self.env!r} must return a Fleet or a task (a subclass of perfedrl.envs.Task or "
                f"PlayedTask), or take a policy and return a sampler; it returned a {type(world).__name__}"
            )
        if self.agent is not None and not isinstance(world, Fleet):
            raise UserError(f"agent = {self.agent} selects an agent of a fleet; {self.env!r} returned a single task")
        return world

    def tasks(self, number: int) -> Any:
        """This agent's task, as a stack of one."""
        if not isinstance(self._world, Fleet):
            return as_fleet(self._world).train
        fleet, count = self._world, self._world.agents
        alone = count == 1 and fleet.held_out is None
        i = (0 if alone else number) if self.agent is None else self.agent
        if not 0 <= i < count + fleet.held_out_agents:
            others = f" and {fleet.held_out_agents} held-out agents" if fleet.held_out is not None else ""
            raise UserError(
                f"there is no agent {i}: the fleet of {self.env!r} has {count} training agents{others}, numbered from "
                "0; select one of them by agent = ..."
            )
        part, j = (fleet.train, i) if i < count else (fleet.held_out, i - count)
        return jax.tree.map(lambda x: x[j : j + 1], part)

    def report(self, number: int) -> EnvironmentReport | None:
        """What this agent reports of its environment; None for a sampler, which takes any policy that it is given."""
        return None if self.makes_sampler else report_of(self.tasks(number))

    def environment_spaces(self, number: int) -> Spaces | None:
        """The spaces of this agent's environment, where they are known."""
        if self.makes_sampler:
            return None
        return jax.tree.map(lambda x: x[0], self.tasks(number)).environment_spaces

    def sampler(self, policy: Any, number: int) -> tuple[Sampler, Any]:
        """This agent's Python sampler for a policy, and the object with its discount and episode outcomes."""
        if not self.makes_sampler:
            task = self.tasks(number)[0]
            check_fit(task, policy)
            return task.sampler(policy), task
        made = ENVS[self.env](policy=policy, **self._params)
        if not isinstance(made, PythonSampler):
            raise UserError(
                f"the environment {self.env!r} takes a policy, so it must return a sampler, a subclass of "
                f"perfedrl.rollout.PythonSampler; it returned a {type(made).__name__}"
            )
        if made.traceable:
            raise UserError(
                f"the sampler of {self.env!r} must have traceable = False; return a task if JAX can trace it"
            )
        discount = made.discount
        if not isinstance(discount, int | float) or not 0 <= discount < 1:
            raise UserError(f"the sampler of {self.env!r} needs a discount in [0, 1), got {discount!r}")
        return made, made


def as_fleet(world: Any) -> Fleet:
    """A fleet unchanged, or a single task as a fleet of one."""
    return world if isinstance(world, Fleet) else fleet([world])


def load_agent_config(path: str | Path | None, env: str | None = None) -> AgentConfig:
    """Read an agent's settings from a TOML file; `env` replaces its whole table [fleet], or the file.

    Modules that the file names are looked for in its `folder` too, in this process and in those that it starts.
    """
    if path is None:
        if env is None:
            raise UserError("this agent needs an environment: a file, or --env NAME")
        return make_agent_config({"fleet": {"env": env}})
    path = Path(path)
    table = read_table(path, "agent config")
    if env is not None:
        table["fleet"] = {"env": env}
    table = resolve_fleet_file(path, table)
    if isinstance(folder := table.get("folder", "."), str):
        find_modules_in(path.parent / folder)
    try:
        return make_agent_config(table)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def make_agent_config(table: Mapping[str, Any]) -> AgentConfig:
    """Check a table of settings; the error is one sentence about the first problem."""
    config = validated(AgentConfig, table, "agent config")
    if not config.makes_sampler:
        config._world  # noqa: B018
    elif config.agent is not None:
        raise UserError(f"agent = {config.agent} selects an agent of a fleet; {config.env!r} returns a sampler")
    return config


def check_number(number: int) -> int:
    """Check an agent's number in a federation."""
    if not whole(number) or not 0 <= number < LARGEST_NUMBER:
        raise UserError(f"an agent's number must be a whole number from 0 to {LARGEST_NUMBER - 1}, got {number!r}")
    return number


def read_plan(text: str, agent: AgentConfig, number: int = 0) -> Config:
    """Read the server's config and build its experiment, if it is within this agent's trust, limits and privacy.

    Where agents bring their environments, nothing of the plan's fleet is built: its experiment is that of the report in
    the plan, which must fit this agent's own, or of the agent's own report.
    """
    try:
        table = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UserError(f"the plan is not valid TOML: {error}") from error
    if "attack" in table:
        raise UserError("the plan has a table [attack], which is for simulations only: no agent takes part in one")
    if isinstance(table.get("policy"), dict) and SEES in table["policy"]:
        raise UserError("the plan: [policy] sees is for simulations only so far; no agent takes part in such a run")
    if isinstance(table.get("start"), str | dict):
        raise UserError("the plan starts from parameters in a file; a plan cannot choose what is read here")
    reported = table.pop(PLAN_TABLE, None)
    try:
        config = parse_config(_with_own_file(_checked_trust(table, agent), agent))
        if agent.privacy is not None:
            agent.privacy.check(config.privacy)
        agent.limits.check_agents(config.fleet)
        with within(agent.limits.sizes):
            config = _on_report(config, reported, agent, number) if agents_bring_environments(config) else config
            experiment = config.experiment
        agent.limits.check_parameters(experiment.policy)
    except UserError as error:
        raise UserError(f"the plan: {error}") from error
    if config.changed_code:
        raise UserError(
            f"the plan: {config.changed_code[0]} is other code here than on the server; copy the server's files"
        )
    if len(config.seeds) != 1:
        raise UserError(f"expected a plan with exactly one seed, got {len(config.seeds)}")
    algorithm, most = experiment.algorithm, agent.limits.trajectories_per_round
    if not algorithm.federated:
        raise UserError(f"the plan's algorithm {config.algorithm['name']!r} sends nothing, so it needs no federation")
    if algorithm.trajectories_per_round > most:
        raise UserError(
            f"the plan needs {algorithm.trajectories_per_round} trajectories per round; this agent's limit is {most}"
        )
    return config


def _checked_trust(table: dict[str, Any], agent: AgentConfig) -> dict[str, Any]:
    """Reject import paths that the agent does not trust.

    A fleet that is played in Python may name anything: it is replaced by one that names nothing, of as many agents.
    """
    fleet = table.get("fleet")
    if isinstance(fleet, dict) and isinstance(fleet.get("env"), str) and played_in_python(fleet):
        given = ENVS.resolve(fleet["env"], {key: value for key, value in fleet.items() if key != "env"})
        table = {**table, "fleet": {"env": "gymnasium", "id": NAMELESS, "agents": training_agents(given)}}
    for place, value in _texts(table):
        if ":" in value and value not in agent.trust:
            raise UserError(
                f"{abbreviated(value)} as {place} is a name that this agent does not trust: it only imports names that "
                "perfedrl registers, and those that its own config lists under trust"
            )
    return table


def _on_report(config: Config, reported: Any, agent: AgentConfig, number: int) -> Config:
    """Build the plan's experiment on the report in the plan, or on this agent's own."""
    own = agent.report(number)
    if reported is None and own is None:
        raise UserError("it has no report of an environment, and this agent's sampler cannot give one")
    if reported is not None and not isinstance(reported, dict):
        raise UserError(f"its {PLAN_TABLE} is not a table")
    report = own if reported is None else checked_report(reported)
    assert report is not None
    if own is not None and not own.fits(report):
        raise UserError(f"its agents have {report}; this agent's environment has {own}")
    return with_report(config, report)


def _texts(value: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """All texts in a table, with their keys; a date counts as the text that it is converted to."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _texts(item, f"{place}.{key}" if place else key)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item, place)
    elif (place != "fleet.file") and not isinstance(value, bool | int | float):
        yield place, str(value)


def _with_own_file(table: dict[str, Any], agent: AgentConfig) -> dict[str, Any]:
    """Replace the server's file of arrays by this agent's: a plan cannot choose what is read here."""
    fleet = table.get("fleet")
    if not isinstance(fleet, dict) or not fleet.get("file"):
        return table
    if not agent.fleet.get("file"):
        raise UserError("its fleet is in a file on the server; this agent's own config must name a file of arrays too")
    rest = {key: value for key, value in fleet.items() if key not in ("file", "sha256")}
    return {**table, "fleet": {**rest, "file": agent.fleet["file"]}}
