"""The points at which estimators are compared: agents at stages of training, a direction, and the truth."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from jaxtyping import Float, Key, PRNGKeyArray, PyTree

from perfedrl.algorithms import Algorithm
from perfedrl.compilation import jit
from perfedrl.errors import UserError
from perfedrl.estimators import BASELINES, CURVATURES, PolicyObjective, Sampled, log_probs, policy_gradient
from perfedrl.estimators.advantages import credit
from perfedrl.estimators.tree_math import scale_by
from perfedrl.exact.tabular import ExactObjective, float64
from perfedrl.experiments.config import Config
from perfedrl.key_domains import ESTIMATOR_COMPARISON
from perfedrl.simulation.simulator import Simulation
from perfedrl.studies.estimators.candidates import CURVATURE, GRADIENT
from perfedrl.theory.fleet_problem import is_tabular
from perfedrl.types import Array, Params, Progress, Trajectory

STAGES = ("start", "middle", "end")
REFERENCE, CHUNK, DIRECTION_CHUNKS = 50_000, 500, 20
"""Trajectories from which an unknown truth is estimated, trajectories per chunk, and chunks for the direction."""


class EstimateInputs(NamedTuple):
    """The inputs of estimates: an agent, parameters, a direction, and a key per replicate.

    `counted` is 1 for parameters that actions depend on, and 0 for others, such as those of a value network.
    """

    task: Any
    theta: Params
    v: Params
    counted: Params
    keys: Key[Array, " replicate"]


class Point(NamedTuple):
    """One agent at one stage, with the truth of each quantity as one exact row or as rows of independent estimates."""

    stage: str
    round: int
    at: EstimateInputs
    truth: Mapping[str, Float[Array, "part d"]]


def visit(
    config: Config, stages: Sequence[str], replicates: int, agents: int, seed: int, reference: int, progress: Progress
) -> Iterator[Point]:
    """Train one seed of a config and yield the points of the first `agents` agents at each stage."""
    parts = config.experiment
    rounds = {"start": 0, "middle": config.rounds // 2, "end": config.rounds}
    for stage, message in train(config, {stage: rounds[stage] for stage in STAGES if stage in stages}, seed, progress):
        theta, alpha = parts.algorithm.shared(message), step_size(parts.algorithm, message)
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), ESTIMATOR_COMPARISON), rounds[stage])
        for i in range(agents):
            progress(f"the truth at the {stage}, agent {i}")
            task = parts.fleet.task(i)
            estimates, other = jax.random.split(jax.random.fold_in(key, i))
            if is_tabular(parts.fleet, parts.policy):
                v, truth = _exact(parts.policy, task, theta, alpha)
            else:
                v, truth = _referred(parts.policy, task, theta, alpha, other, reference // CHUNK)
            counted = _plays_by(parts.policy, task, theta, other)
            keys = jax.random.split(estimates, replicates)
            at = EstimateInputs(task, theta, single(v), counted, keys)
            yield Point(stage, rounds[stage], at, jax.tree.map(np.asarray, truth))


def train(config: Config, rounds: Mapping[str, int], seed: int, progress: Progress) -> Iterator[tuple[str, PyTree]]:
    """Train one seed and yield the message that the server would broadcast at each stage."""
    simulation = Simulation(config.experiment, [seed])
    state, at = simulation.start(), 0
    for stage, round_ in rounds.items():
        if round_ > at:
            progress(f"training to round {round_}")
            state, at = simulation.advance(state, at, round_ - at), round_
        if not all(np.isfinite(x).all() for x in jax.tree.leaves(state)):
            raise UserError(f"training diverged before round {round_}: lower alpha or beta")
        yield stage, jax.tree.map(lambda x: x[0], state.server.message)


def step_size(algorithm: Algorithm, message: PyTree) -> Any:
    """Adaptation step size in training; 0 where the algorithm has none."""
    alpha = algorithm.adaptation_step_size(message)
    return 0.0 if alpha is None else alpha


def single(tree: Params) -> Params:
    """A tree in single precision, the precision of the estimators."""
    return jax.tree.map(lambda x: np.asarray(x, np.float32), tree)


def unit(tree: Params) -> Params:
    """A tree scaled to length 1; unchanged where its length is 0."""
    length = optax.tree.norm(tree)
    return optax.tree.scale(1 / jnp.where(length > 0, length, 1), tree)


def flat(tree: Params) -> Float[Array, " d"]:
    """A tree as one vector."""
    return ravel_pytree(tree)[0]


def exactly(policy: Any, task: Any, theta: Params, alpha: Any) -> tuple[Params, dict[str, Array]]:
    """The direction of the outer gradient and the exact truth, by dynamic programming."""
    agent = ExactObjective(task, policy)
    g = agent.gradient(theta)
    v = unit(agent.gradient(optax.tree.add(theta, scale_by(alpha, g))))
    return v, {GRADIENT: flat(g)[None], CURVATURE: flat(agent.curvature(theta, v))[None]}


def from_many(
    policy: Any, task: Any, theta: Params, alpha: Any, key: PRNGKeyArray, chunks: int
) -> tuple[Params, dict[str, Array]]:
    """The direction and the truth from unbiased low-variance estimates of many trajectories, chunk by chunk."""
    agent = Sampled(policy, "causal", "ridge")(task)
    inner, outer, reference = jax.random.split(key, 3)
    g = mean_gradient(agent, theta, jax.random.split(inner, DIRECTION_CHUNKS))
    v = unit(mean_gradient(agent, optax.tree.add(theta, scale_by(alpha, g)), jax.random.split(outer, DIRECTION_CHUNKS)))

    def part(key: PRNGKeyArray) -> dict[str, Array]:
        batch = agent.sampler.sample(theta, key, CHUNK)
        product = agent.product(CURVATURES["causal"](), theta, batch, v)
        return {GRADIENT: flat(return_gradient(agent, theta, batch)), CURVATURE: flat(product)}

    return v, jax.lax.map(part, jax.random.split(reference, chunks))


def mean_gradient(agent: PolicyObjective, theta: Params, keys: Key[Array, " chunk"]) -> Params:
    """The policy gradient from many trajectories."""

    def one(key: PRNGKeyArray) -> Params:
        return return_gradient(agent, theta, agent.sampler.sample(theta, key, CHUNK))

    return jax.tree.map(lambda x: jnp.mean(x, axis=0), jax.lax.map(one, keys))


def return_gradient(agent: PolicyObjective, theta: Params, batch: Trajectory) -> Params:
    """The gradient of the return alone, without a policy's further objectives such as an entropy bonus."""
    credited = credit(agent.policy, BASELINES["ridge"](), agent.discount, theta, batch)
    return policy_gradient(agent.policy.log_prob, theta, batch, credited.advantage)


def plays_by(policy: Any, task: Any, theta: Params, key: PRNGKeyArray) -> Params:
    """1 for leaves of the parameters that actions depend on, 0 elsewhere; tested at perturbed parameters."""
    other = jax.tree.map(lambda x: x + jax.random.normal(key, x.shape, x.dtype), theta)
    batch = Sampled(policy)(task).sampler.sample(other, key, 8)
    score = jax.grad(lambda t: jnp.sum(log_probs(policy.log_prob, t, batch)))(other)
    return jax.tree.map(lambda x: jnp.full_like(x, jnp.any(x != 0)), score)


_exact = float64(jit(exactly))
_referred = jit(from_many, static_argnums=5)
_plays_by = jit(plays_by)
