"""Inspection of a config before training: its agents, the settings in which they differ, and an episode."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from perfedrl.envs import Fleet
from perfedrl.envs.base import DataTask, PlayedTask
from perfedrl.envs.new_agents import MOST_NUMBERS
from perfedrl.errors import UserError
from perfedrl.experiments.config import Config
from perfedrl.registry import abbreviated
from perfedrl.rollout import sampler
from perfedrl.simulation.simulator import Simulation
from perfedrl.types import Params, Trajectory


@dataclass(frozen=True)
class Inspection:
    """A config's fleet: settings that all agents share, settings of each agent, and the cost of a round per agent."""

    shared: dict[str, str]
    own: list[dict[str, str]]
    """One table for each agent, training agents first."""
    agents: int
    parameters: int
    trajectories: int
    bytes: int
    memory: float
    """The estimated memory that training needs, in bytes."""
    new_agent: str = ""
    """The settings of a new agent; empty where none can be made."""


def inspect(config: Config) -> Inspection:
    """Describe the fleet of a config, after a check that its training fits into memory; nothing is trained."""
    experiment = config.experiment
    simulation = Simulation(experiment, config.seeds)
    need = simulation.check_memory(simulation.start())
    params = jax.eval_shape(experiment.policy.init, jax.random.key(0))
    shared, own = describe_agents(experiment.fleet)
    return Inspection(
        shared,
        own,
        experiment.fleet.agents,
        sum(x.size for x in jax.tree.leaves(params)),
        experiment.algorithm.trajectories_per_round,
        experiment.bytes_per_round,
        need.bytes,
        family.describe() if (family := experiment.fleet.new_agents) else "",
    )


def describe_agents(fleet: Fleet) -> tuple[dict[str, str], list[dict[str, str]]]:
    """The settings that all agents share, and those of each agent, by name."""
    tasks = [fleet.task(i) for i in range(fleet.agents)]
    tasks += [fleet.task(i, held_out=True) for i in range(fleet.held_out_agents)]
    first, settings = tasks[0], [task.settings for task in tasks]

    def is_shared(name: str) -> bool:
        return all(name in each and np.array_equal(settings[0][name], each[name]) for each in settings)

    equal = {name for name in settings[0] if is_shared(name)}
    general = {"horizon": first.horizon, "discount": first.discount}
    spaces = {"actions": first.actions, "action_size": first.action_size, "observation_size": first.observation_size}
    general |= {name: size for name, size in spaces.items() if size is not None}
    shared = general | {name: settings[0][name] for name in settings[0] if name in equal}
    own = [{name: format_setting(each.get(name)) for name in settings[0] if name not in equal} for each in settings]
    return {name: format_setting(x) for name, x in shared.items()}, own


def format_setting(value: Any) -> str:
    """A setting as text for a table."""
    if not isinstance(value, np.ndarray | float | np.floating):
        return abbreviated(value)
    array = np.asarray(value)
    if array.size > MOST_NUMBERS:
        return f"{' x '.join(map(str, array.shape))} numbers"
    text = np.array2string(array, precision=4, separator=", ", suppress_small=True).replace("\n", "")
    return text if array.ndim else f"{array:.4g}"


def episode(config: Config, agent: int) -> tuple[Any, Params, Trajectory | None]:
    """An agent's task, the initial parameters, and one episode with them; None for agents with examples."""
    fleet, policy = config.experiment.fleet, config.experiment.policy
    count = fleet.agents + fleet.held_out_agents
    if not 0 <= agent < count:
        raise UserError(f"there is no agent {agent}: the fleet has {count}, numbered from 0, training agents first")
    task = fleet.agent(agent)
    params = config.experiment.start_params(config.experiment.start_number(config.seeds[0]))
    if isinstance(task, DataTask):
        return task, params, None
    play = partial(sampler(task, policy).sample, m=1)
    batch = (play if isinstance(task, PlayedTask) else jax.jit(play))(params, jax.random.key(agent))
    return task, params, jax.tree.map(lambda x: np.asarray(x)[0], batch)
