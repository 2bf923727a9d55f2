"""An agent's computation as functions of (message, state, moment): compiled for a JAX task, plain for a Python sampler.

A task's functions are compiled as the simulator compiles them for a fleet, with the same keys: on a CPU they give the
same bits.
"""

import math
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
from perfedrl.envs import Fleet, PlayedTask
from perfedrl.errors import UserError
from perfedrl.estimators import Objective, PolicyObjective
from perfedrl.experiments.config import Config
from perfedrl.federation.agent.config import AgentConfig
from perfedrl.memory import check_memory, check_operations, estimate
from perfedrl.simulation.compiled import measure_replicas
from perfedrl.simulation.evaluation import EVALUATIONS, Evaluation, MonteCarlo, Outcomes, check_fit, episode_outcomes
from perfedrl.simulation.keys import agent_key
from perfedrl.simulation.measurements import before_and_after
from perfedrl.simulation.simulator import MANY_DECISIONS
from perfedrl.types import Params, Sampler, Trajectory

AgentFunction = Callable[..., Any]
"""A function of an agent's objective or evaluation, an algorithm, a message, a state, a task and a key."""


def train(agent: Any, algorithm: Algorithm, message: PyTree, state: PyTree, task: Any, key: PRNGKeyArray) -> Any:
    """One agent's local training in one round."""
    return algorithm.client(message, state, agent(task), key)


def personalize(
    m: int, agent: Any, algorithm: Algorithm, message: PyTree, state: PyTree, task: Any, key: PRNGKeyArray
) -> Any:
    """The agent's own parameters from m trajectories."""
    adaptation, _ = jax.random.split(key)
    return algorithm.personalize(message, state, agent(task), adaptation, m)


def compare(
    evaluation: Evaluation,
    _: Algorithm,
    both: tuple[Params, Params],
    __: PyTree,
    task: Any,
    key: PRNGKeyArray,
) -> dict[str, Outcomes]:
    """The outcomes of the shared and of the agent's own parameters, under the same random numbers."""
    _, episodes = jax.random.split(key)
    return {when: evaluation.outcomes(task, x, episodes) for when, x in zip(("before", "after"), both, strict=True)}


class CompiledComputation:
    """The compiled functions of an agent with a JAX environment."""

    def __init__(self, config: Config, agent: AgentConfig, algorithm: Algorithm, number: int):
        experiment, tasks = config.experiment, agent.tasks(number)
        check_fit(jax.tree.map(lambda x: x[0], tasks), experiment.policy)
        params = {key: value for key, value in config.evaluation.items() if key != "name"}
        evaluation = EVALUATIONS[config.evaluation["name"]](fleet=Fleet(tasks), agent=experiment.agent, **params)
        self._agent = experiment.agent
        self._common = {"algorithm": algorithm, "seed": config.seeds[0], "tasks": tasks, "number": number}

        def copies(decisions: int) -> int:
            return 2 if experiment.fleet.agents > 1 and side_by_side(decisions) else 1

        training = copies(algorithm.trajectories_per_round * (tasks.horizon + 1))
        measuring = {"double": evaluation.float64, "copies": copies(evaluation.decisions(tasks))}
        self.train = CompiledFunction(train, what=self._agent, double=False, copies=training, **self._common)
        self.measure = CompiledFunction(before_and_after, what=evaluation, **measuring, **self._common)
        self.compare = CompiledFunction(compare, what=evaluation, **measuring, **self._common)
        self.episodes = math.ceil(evaluation.decisions(tasks) / (tasks.horizon + 1))

    def personalize(self, m: int) -> "CompiledFunction":
        """The function that personalizes with m trajectories."""
        return CompiledFunction(partial(personalize, m), what=self._agent, double=False, copies=1, **self._common)

    def limit_time(self, deadline: float) -> None:
        """Do nothing: compiled work cannot be stopped."""

    mean_return = None
    """Unknown: returns of training episodes stay inside the compiled function."""
    failed_episodes = 0
    """Compiled episodes do not fail."""


class CompiledFunction:
    """A function of one agent, compiled when it is prepared and freed with this object.

    The compiler orders sums differently for a single agent. Where the simulator runs agents side by side, this runs a
    second copy of the agent and drops its results, which costs little.
    """

    def __init__(
        self,
        function: AgentFunction,
        what: Any,
        algorithm: Algorithm,
        seed: int,
        tasks: Any,
        number: int,
        double: bool,
        copies: int,
    ):
        self._function, self._double, self._compiled = function, double, None
        self._what, self._number, self._copies = what, number, copies
        self._algorithms = jax.tree.map(lambda x: np.asarray([x], float), algorithm)
        self._seeds = np.asarray([seed], np.uint32)
        self._tasks = jax.tree.map(lambda x: np.repeat(x, copies, axis=0), tasks)

    def _arguments(self, message: PyTree, state: PyTree, moment: int) -> tuple:
        return (
            self._algorithms,
            jax.tree.map(lambda x: np.asarray(x)[None], message),
            jax.tree.map(lambda x: np.repeat(np.asarray(x)[None, None], self._copies, axis=1), state),
            self._seeds,
            self._what,
            self._tasks,
            np.uint32(self._number),
            np.uint32(moment),
        )

    def prepare(self, message: PyTree, state: PyTree) -> None:
        """Compile for messages and states of this structure."""
        if self._compiled is not None:
            return
        run = partial(measure_replicas, how=self._function, chunk=None, devices=1)
        options = compilation.options(jax.default_backend())

        def compiled(*args: Any) -> Any:
            traced = jax.jit(run, compiler_options=options).trace(*args)
            check_operations(traced.jaxpr)
            check_memory(estimate(traced.jaxpr))
            return traced.lower().compile()

        self._compiled = self._in_precision(compiled, self._arguments(message, state, 0))

    def __call__(self, message: PyTree, state: PyTree, moment: int) -> Any:
        self.prepare(message, state)
        result = self._in_precision(self._compiled, self._arguments(message, state, moment))
        return jax.tree.map(lambda x: np.asarray(x)[0, 0], result)

    def _in_precision(self, function: Any, args: tuple) -> Any:
        """Call a function with its arguments in double or single precision."""
        wide = np.float64 if self._double else np.float32

        def converted(x: Any) -> Any:
            return np.asarray(x, wide) if jnp.issubdtype(np.asarray(x).dtype, np.floating) else x

        with jax.enable_x64(self._double):
            return function(*jax.tree.map(converted, args))


class PythonComputation:
    """The functions of an agent with a Python sampler, e.g. a robot: numeric parts are compiled, sampling is not."""

    def __init__(self, config: Config, agent: AgentConfig, algorithm: Algorithm, number: int):
        experiment = config.experiment
        sampler, about = agent.sampler(experiment.policy, number)
        self._sampler = CheckedSampler(sampler, agent.env, float(about.discount))
        self._about, self._failed_before = about, 0
        self._objective = PolicyObjective(
            self._sampler, experiment.policy, float(about.discount), experiment.agent.forms
        )
        given = experiment.evaluation
        counts = given if isinstance(given, MonteCarlo) else MonteCarlo(experiment.agent)
        evaluation = SampledEvaluation(self._objective, about, counts.trajectories, counts.episodes)
        self._algorithm, self._key = algorithm, agent_key(config.seeds[0], number)
        self.train = PythonFunction(train, self._objective_of, algorithm, self._key)
        self.measure = PythonFunction(before_and_after, evaluation, algorithm, self._key)
        self.compare = PythonFunction(compare, evaluation, algorithm, self._key)
        self.episodes = counts.trajectories + 2 * counts.episodes

    def _objective_of(self, _: Any) -> PolicyObjective:
        return self._objective

    def personalize(self, m: int) -> "PythonFunction":
        """The function that personalizes with m trajectories."""
        return PythonFunction(partial(personalize, m), self._objective_of, self._algorithm, self._key)

    def limit_time(self, deadline: float) -> None:
        """Sample nothing more after a moment of `time.monotonic`; count returns and failures from now on."""
        self._sampler.deadline, self._sampler.returns = deadline, []
        self._failed_before = self._failed_so_far

    @property
    def mean_return(self) -> float | None:
        """The mean return of the episodes since `limit_time`; None if none was played."""
        returns = self._sampler.returns
        return float(np.mean(np.concatenate(returns))) if returns else None

    @property
    def failed_episodes(self) -> int:
        """The number of episodes that failed since `limit_time`; samplers of one's own do not count them."""
        return self._failed_so_far - self._failed_before

    @property
    def _failed_so_far(self) -> int:
        return self._about.failures.episodes if isinstance(self._about, PlayedTask) else 0


class PythonFunction:
    """A function of one agent that is called without compilation."""

    def __init__(self, function: AgentFunction, what: Any, algorithm: Algorithm, key: PRNGKeyArray):
        self._function, self._what, self._algorithm, self._key = function, what, algorithm, key

    def prepare(self, message: PyTree, state: PyTree) -> None:
        """Do nothing: compilation would need trajectories, which are costly."""

    def __call__(self, message: PyTree, state: PyTree, moment: int) -> Any:
        message, state = jax.tree.map(jnp.asarray, (message, state))
        key = jax.random.fold_in(self._key, np.uint32(moment))
        return jax.tree.map(np.asarray, self._function(self._what, self._algorithm, message, state, None, key))


class SampledEvaluation:
    """An evaluation by the episodes of an agent's own sampler."""

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


class CheckedSampler:
    """A Python sampler with a deadline, whose trajectories are checked before they are used.

    `returns` collects the returns of all episodes, batch by batch, until somebody empties it.
    """

    traceable = False

    def __init__(self, sampler: Sampler, name: str, discount: float):
        self._sampler, self._name, self._discount, self.deadline = sampler, name, discount, float("inf")
        self.returns: list[np.ndarray] = []

    def sample(self, params: Params, key: PRNGKeyArray, m: int) -> Trajectory:
        if time.monotonic() > self.deadline:
            raise UserError(f"the agent's time limit for one request is over, and {m} more trajectories are needed")
        try:
            obs, action, reward, mask = self._sampler.sample(params, key, m)
            batch = Trajectory(
                *jax.tree.map(jnp.asarray, (obs, action)), *(jnp.asarray(x, float) for x in (reward, mask))
            )
        except UserError:  # the sampler's own sentence, for example that its environment failed
            raise
        except (TypeError, ValueError) as error:
            raise UserError(f"expected a Trajectory from the sampler of {self._name!r}: {error}") from error
        shape = batch.reward.shape
        if len(shape) != 2 or any(x.shape[:2] != (m, shape[1]) for x in jax.tree.leaves(batch)):
            shapes = [x.shape for x in jax.tree.leaves(batch)]
            raise UserError(f"expected {m} trajectories from the sampler of {self._name!r}, got arrays {shapes}")
        if not all(np.isfinite(x).all() for x in jax.tree.leaves(batch)):
            raise UserError(f"the sampler of {self._name!r} returned values that are not finite")
        self.returns.append(np.asarray(batch.reward, float) @ self._discount ** np.arange(shape[1]))
        return batch


def side_by_side(decisions: int) -> bool:
    """Whether the simulator runs agents with so many decisions side by side."""
    return jax.default_backend() != "cpu" or decisions < MANY_DECISIONS
