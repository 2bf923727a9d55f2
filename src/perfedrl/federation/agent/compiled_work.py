"""What an agent computes, as functions of (message, state, moment): compiled for a task, played for a Python sampler.

A task's are compiled as the simulator compiles them for a fleet, with the same keys: on a CPU they give its bits.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray, PyTree

from perfedrl import compilation
from perfedrl.algorithms import Algorithm
from perfedrl.envs import Fleet
from perfedrl.errors import UserError
from perfedrl.estimators import Objective, PolicyObjective
from perfedrl.experiments.config import Config
from perfedrl.federation.agent.config import AgentConfig
from perfedrl.simulation.compiled import agent_key, measure_lanes
from perfedrl.simulation.evaluation import EVALUATIONS, Evaluation, MonteCarlo, Outcomes, check_fit, episode_outcomes
from perfedrl.simulation.measurements import before_and_after
from perfedrl.simulation.simulator import MANY_DECISIONS
from perfedrl.types import Params, Sampler, Trajectory

How = Callable[..., Any]
"""A function of what an agent has (its objective or its evaluation), algorithm, message, state, task and key."""


def train(agent: Any, algorithm: Algorithm, message: PyTree, state: PyTree, task: Any, key: PRNGKeyArray) -> Any:
    """One agent's work in one round."""
    return algorithm.client(message, state, agent(task), key)


def own(m: int, agent: Any, algorithm: Algorithm, message: PyTree, state: PyTree, task: Any, key: PRNGKeyArray) -> Any:
    """The agent's own parameters from m trajectories."""
    adaptation, _ = jax.random.split(key)
    return algorithm.personalize(message, state, agent(task), adaptation, m)


def worth(
    evaluation: Evaluation,
    _: Algorithm,
    both: tuple[Params, Params],
    __: PyTree,
    task: Any,
    key: PRNGKeyArray,
) -> dict[str, Outcomes]:
    """What the shared parameters and an agent's own are worth to it, under the same uniforms."""
    _, episodes = jax.random.split(key)
    return {when: evaluation.outcomes(task, x, episodes) for when, x in zip(("before", "after"), both, strict=True)}


class Compiled:
    """The programs of an agent that lives in a JAX environment."""

    def __init__(self, config: Config, agent: AgentConfig, algorithm: Algorithm, number: int):
        parts, tasks = config.parts, agent.tasks(number)
        check_fit(jax.tree.map(lambda x: x[0], tasks), parts.policy)
        params = {key: value for key, value in config.evaluation.items() if key != "name"}
        evaluation = EVALUATIONS[config.evaluation["name"]](fleet=Fleet(tasks), agent=parts.agent, **params)
        fixed = {"algorithm": algorithm, "seed": config.seeds[0], "tasks": tasks, "number": number}
        among = lambda decisions: 2 if parts.fleet.agents > 1 and side_by_side(decisions) else 1  # noqa: E731
        trained = among(algorithm.trajectories_per_round * (tasks.horizon + 1))
        measured = {"double": evaluation.float64, "copies": among(evaluation.decisions(tasks))}
        self._own = lambda m: Program(partial(own, m), what=parts.agent, double=False, copies=1, **fixed)
        self.train = Program(train, what=parts.agent, double=False, copies=trained, **fixed)
        self.measure = Program(before_and_after, what=evaluation, **measured, **fixed)
        self.worth = Program(worth, what=evaluation, **measured, **fixed)
        self.episodes = episodes(evaluation) if evaluation.decisions(tasks) else 0

    def own(self, m: int) -> "Program":
        return self._own(m)

    def start(self, deadline: float) -> None:
        """Compiled work cannot be stopped."""


class Program:
    """A function of one agent, compiled when it is prepared and let go with this object.

    The compiler orders sums in another way where there is a single agent. So where the simulator works on agents side
    by side, there is a copy of the agent here, whose results nobody looks at: such work is small.
    """

    def __init__(
        self, how: How, what: Any, algorithm: Algorithm, seed: int, tasks: Any, number: int, double: bool, copies: int
    ):
        self._how, self._double, self._compiled = how, double, None
        lanes = jax.tree.map(lambda x: np.asarray([x], float), algorithm), np.asarray([seed], np.uint32)
        tasks = jax.tree.map(lambda x: np.repeat(x, copies, axis=0), tasks)
        self._args = lambda message, state, moment: (
            lanes[0],
            jax.tree.map(lambda x: np.asarray(x)[None], message),
            jax.tree.map(lambda x: np.repeat(np.asarray(x)[None, None], copies, axis=1), state),
            lanes[1],
            what,
            tasks,
            np.uint32(number),
            np.uint32(moment),
        )

    def prepare(self, message: PyTree, state: PyTree) -> None:
        """Compile for such a message and such a state."""
        if self._compiled is None:
            run = partial(measure_lanes, how=self._how, chunk=None, devices=1)
            options = compilation.options(jax.default_backend())
            compiled = lambda *args: jax.jit(run, compiler_options=options).lower(*args).compile()  # noqa: E731
            self._compiled = self._precisely(compiled, self._args(message, state, 0))

    def __call__(self, message: PyTree, state: PyTree, moment: int) -> Any:
        self.prepare(message, state)
        result = self._precisely(self._compiled, self._args(message, state, moment))
        return jax.tree.map(lambda x: np.asarray(x)[0, 0], result)

    def _precisely(self, f: Any, args: tuple) -> Any:
        """Call a function with its arguments in the program's precision."""
        wide = np.float64 if self._double else np.float32
        precise = lambda x: np.asarray(x, wide) if jnp.issubdtype(np.asarray(x).dtype, np.floating) else x  # noqa: E731
        with jax.enable_x64(self._double):
            return f(*jax.tree.map(precise, args))


class Live:
    """The functions of an agent that samples in Python, a robot, say: numeric parts are compiled, the rest is not."""

    def __init__(self, config: Config, agent: AgentConfig, algorithm: Algorithm, number: int):
        parts = config.parts
        made, about = agent.sampler(parts.policy, number)
        self._sampler = Guarded(made, agent.env)
        objective = PolicyObjective(self._sampler, parts.policy, float(about.discount), parts.agent.forms)
        asked = parts.evaluation if isinstance(parts.evaluation, MonteCarlo) else MonteCarlo(parts.agent)
        evaluation = Tried(objective, about, asked.trajectories, asked.episodes)
        key = agent_key(config.seeds[0], number)
        self._own = lambda m: Play(partial(own, m), lambda _: objective, algorithm, key)
        self.train = Play(train, lambda _: objective, algorithm, key)
        self.measure = Play(before_and_after, evaluation, algorithm, key)
        self.worth = Play(worth, evaluation, algorithm, key)
        self.episodes = episodes(asked)

    def own(self, m: int) -> "Play":
        return self._own(m)

    def start(self, deadline: float) -> None:
        """From then on nothing more is sampled."""
        self._sampler.deadline = deadline


class Play:
    """A function of one agent, called as it is."""

    def __init__(self, how: How, what: Any, algorithm: Algorithm, key: PRNGKeyArray):
        self._call = lambda message, state, moment: how(
            what, algorithm, message, state, None, jax.random.fold_in(key, np.uint32(moment))
        )

    def prepare(self, message: PyTree, state: PyTree) -> None:
        """Nothing can be compiled before there are trajectories, and they cost."""

    def __call__(self, message: PyTree, state: PyTree, moment: int) -> Any:
        message, state = jax.tree.map(jnp.asarray, (message, state))
        return jax.tree.map(np.asarray, self._call(message, state, moment))


class Tried:
    """What an agent's parameters are worth by what its sampler plays."""

    few_shot, repeats, rollouts, float64 = (), 1, 0, False

    def __init__(self, objective: PolicyObjective, about: Any, trajectories: int, episodes: int):
        self._objective, self._about, self.trajectories, self.episodes = objective, about, trajectories, episodes

    def objective(self, task: Any) -> Objective:
        return self._objective

    def decisions(self, task: Any) -> int:
        return 0

    def outcomes(self, task: Any, params: Params, key: PRNGKeyArray) -> Outcomes:
        played = self.sample(task, params, key, self.episodes)
        return {name: jnp.mean(x) for name, x in episode_outcomes(self._about, played).items()}

    def sample(self, task: Any, params: Params, key: PRNGKeyArray, m: int) -> Trajectory:
        return self._objective.sampler.sample(params, key, m)


class Guarded:
    """A Python sampler whose trajectories are looked at before anything is made of them, until a deadline."""

    traceable = False

    def __init__(self, sampler: Sampler, name: str):
        self._sampler, self._name, self.deadline = sampler, name, float("inf")

    def sample(self, params: Params, key: PRNGKeyArray, m: int) -> Trajectory:
        if time.monotonic() > self.deadline:
            raise UserError(f"the agent's time for one request is over, and {m} more trajectories are needed")
        try:
            obs, action, reward, mask = self._sampler.sample(params, key, m)
            batch = Trajectory(
                *jax.tree.map(jnp.asarray, (obs, action)), *(jnp.asarray(x, float) for x in (reward, mask))
            )
        except (TypeError, ValueError) as error:
            raise UserError(f"the sampler of {self._name!r} gave no Trajectory: {error}") from error
        shape = batch.reward.shape
        if len(shape) != 2 or any(x.shape[:2] != (m, shape[1]) for x in jax.tree.leaves(batch)):
            shapes = [x.shape for x in jax.tree.leaves(batch)]
            raise UserError(f"the sampler of {self._name!r} was asked for {m} trajectories and gave arrays {shapes}")
        if not all(np.isfinite(x).all() for x in jax.tree.leaves(batch)):
            raise UserError(f"the sampler of {self._name!r} gave numbers that are not finite")
        return batch


def episodes(evaluation: Any) -> int:
    """What an evaluation by sampling takes of one agent."""
    return evaluation.trajectories + 2 * getattr(evaluation, "episodes", 0)


def side_by_side(decisions: int) -> bool:
    """Whether the simulator works on agents of so many decisions side by side."""
    return jax.default_backend() != "cpu" or decisions < MANY_DECISIONS
