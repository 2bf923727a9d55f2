"""Measurements of one agent: before and after adaptation, for several budgets, and after each adaptation step."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, PRNGKeyArray, PyTree

from perfedrl.algorithms import Algorithm
from perfedrl.envs.base import environment_part
from perfedrl.errors import UserError
from perfedrl.estimators import Objective
from perfedrl.estimators.meta import iterate
from perfedrl.simulation.evaluation import Evaluation, Outcomes
from perfedrl.types import Array, Params


def before_and_after(
    evaluation: Evaluation, algorithm: Algorithm, message: PyTree, client: PyTree, task: Any, key: PRNGKeyArray
) -> dict[str, Outcomes]:
    """One agent's outcomes before and after adaptation.

    Before adaptation the agent uses the shared parameters together with its personal ones, if the algorithm has any.
    Both measurements use the same uniforms, so that their difference is less noisy than either.
    """
    adaptation, episodes = jax.random.split(key)
    own = algorithm.personalize(message, client, evaluation.objective(task), adaptation, evaluation.trajectories)
    start = algorithm.shared(algorithm.with_personal_part(message, client))
    return {
        "before": evaluation.outcomes(task, start, episodes),
        "after": evaluation.outcomes(task, own, episodes),
    }


def deploy(
    evaluation: Evaluation, algorithm: Algorithm, message: PyTree, client: PyTree, task: Any, key: PRNGKeyArray
) -> tuple[dict[str, Float[Array, " budget"]], Any]:
    """One agent's outcomes after personalization from each budget of trajectories, and observations of some episodes.

    Every personalization has its own trajectories and is measured over its own episodes; outcomes are means over the
    repeats. The saved episodes use the same random numbers for every budget.
    """
    budgets, shown = jax.random.split(key)
    objective = evaluation.objective(task)

    def once(m: int, key: PRNGKeyArray) -> tuple[Outcomes, Params]:
        adaptation, episodes = jax.random.split(key)
        own = algorithm.personalize(message, client, objective, adaptation, m)
        return evaluation.outcomes(task, own, episodes), own

    outcomes, rollouts = [], []
    for m in evaluation.few_shot:
        keys = jax.random.split(jax.random.fold_in(budgets, m), evaluation.repeats)
        # One after the other, to need the memory of a single repeat.
        measured, own = (
            jax.lax.map(partial(once, m), keys) if objective.traceable else map_in_python(partial(once, m), keys)
        )
        outcomes.append(jax.tree.map(lambda x: jnp.mean(x, axis=0), measured))
        if evaluation.rollouts:
            last = jax.tree.map(lambda x: x[-1], own)
            rollouts.append(environment_part(task, evaluation.sample(task, last, shown, evaluation.rollouts).obs))
    return stack_trees(outcomes), stack_trees(rollouts) if rollouts else None


def step_by_step(
    steps: int,
    m: int,
    alpha: float | None,
    evaluation: Evaluation,
    algorithm: Algorithm,
    message: PyTree,
    client: PyTree,
    task: Any,
    key: PRNGKeyArray,
) -> dict[str, Float[Array, " steps"]]:
    """One agent's outcomes before adaptation and after each of `steps` adaptation steps from m trajectories each.

    All are measured over the same episodes, which no step uses. The step size is `alpha`, or by default the
    algorithm's step size at deployment. A choice of the initialization is part of the first step.
    """
    objective, (adaptation, episodes) = evaluation.objective(task), jax.random.split(key)
    step_size = deployed_step_size(algorithm, message) if alpha is None else alpha

    def measured(theta: Params) -> Outcomes:
        return evaluation.outcomes(task, theta, episodes)

    _, after = choose_and_adapt(algorithm, objective, message, client, step_size, adaptation, m, steps, measured)
    before = measured(algorithm.shared(algorithm.with_personal_part(message, client)))
    return jax.tree.map(lambda x, xs: jnp.append(x, xs), before, after)


def choose_and_adapt(
    algorithm: Algorithm,
    agent: Objective,
    message: PyTree,
    client: PyTree,
    alpha: Any,
    key: PRNGKeyArray,
    m: int,
    steps: int,
    record: Callable[[Params], PyTree],
) -> tuple[Params, PyTree]:
    """Take adaptation steps from an agent's starting point, from m trajectories each, and record each step's end.

    Where the algorithm chooses the starting point by trajectories, they are some of the first step's.
    """

    def step(m: int, theta: Params, key: PRNGKeyArray) -> tuple[Params, PyTree]:
        theta = algorithm.adaptation_step(agent, theta, alpha, key, m)
        return theta, record(theta)

    keys, choosing = jax.random.split(key, steps), algorithm.choosing_trajectories(m)
    start = algorithm.starting_point(message, client, agent, keys[0], m)
    if not choosing:
        return iterate(agent, partial(step, m), start, keys)
    theta, first = iterate(agent, partial(step, m - choosing), start, keys[:1])
    if steps == 1:
        return theta, first
    theta, others = iterate(agent, partial(step, m), theta, keys[1:])
    return theta, jax.tree.map(lambda x, y: jnp.concatenate([x, y]), first, others)


def deployed_step_size(algorithm: Algorithm, message: PyTree) -> Any:
    """Step size that agents personalize with; raise `UserError` if the algorithm has none."""
    alpha = algorithm.deployment_step_size(message)
    if alpha is None:
        raise UserError(f"{type(algorithm).__name__} has no adaptation step size; set alpha")
    return alpha


def stack_trees(trees: Sequence[PyTree]) -> PyTree:
    """Stack the leaves of several pytrees along a new first axis."""
    return jax.tree.map(lambda *xs: jnp.stack(xs), *trees)


def map_in_python(f: Callable[[Any], Any], xs: Any) -> Any:
    """Like `jax.lax.map`, for functions that JAX cannot trace."""
    return jax.tree.map(lambda *ys: np.stack(ys), *(f(x) for x in xs))
