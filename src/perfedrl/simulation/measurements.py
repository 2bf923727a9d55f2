"""How a run is measured: every agent before and after its adaptation, by budget, and step by step."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, PRNGKeyArray, PyTree

from perfedrl.algorithms import Algorithm
from perfedrl.errors import UserError
from perfedrl.estimators import adapt
from perfedrl.estimators.meta import iterate
from perfedrl.simulation.evaluation import Evaluation, Outcomes
from perfedrl.types import Array, Params


def before_and_after(
    evaluation: Evaluation, algorithm: Algorithm, message: PyTree, client: PyTree, task: Any, key: PRNGKeyArray
) -> dict[str, Outcomes]:
    """One agent's outcomes under the shared parameters, with what is its own of them, and after adaptation.

    Both are measured with the same uniforms, so that what adaptation gains is less noisy than either.
    """
    adaptation, episodes = jax.random.split(key)
    own = algorithm.personalize(message, client, evaluation.objective(task), adaptation, evaluation.trajectories)
    measure = lambda params: evaluation.outcomes(task, params, episodes)  # noqa: E731
    return {"before": measure(algorithm.shared(algorithm.with_personal_part(message, client))), "after": measure(own)}


def deploy(
    evaluation: Evaluation, algorithm: Algorithm, message: PyTree, client: PyTree, task: Any, key: PRNGKeyArray
) -> tuple[dict[str, Float[Array, " budget"]], Any]:
    """One agent's outcomes after personalization from each budget, and some episodes' observations.

    Every personalization has its own trajectories and is measured over its own episodes; outcomes are means over the
    repeats. The episodes that are kept start alike in every budget.
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
        # One after the other: side by side they would need the memory of all.
        measured, own = jax.lax.map(partial(once, m), keys) if objective.traceable else stacked(partial(once, m), keys)
        outcomes.append(jax.tree.map(lambda x: jnp.mean(x, axis=0), measured))
        if evaluation.rollouts:
            last = jax.tree.map(lambda x: x[-1], own)
            rollouts.append(evaluation.sample(task, last, shown, evaluation.rollouts).obs)
    stack = lambda *xs: jnp.stack(xs)  # noqa: E731
    return jax.tree.map(stack, *outcomes), jax.tree.map(stack, *rollouts) if rollouts else None


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
    """One agent's outcomes before adaptation and after each of some policy-gradient steps from m trajectories each.

    All are measured over the same episodes, which no step learns from. Steps are as long as at deployment, or alpha.
    """
    objective, (adaptation, episodes) = evaluation.objective(task), jax.random.split(key)
    theta = algorithm.shared(algorithm.with_personal_part(message, client))
    by = deployed_step_size(algorithm, message) if alpha is None else alpha

    def step(theta: Params, key: PRNGKeyArray) -> tuple[Params, Outcomes]:
        theta = adapt(objective, theta, by, key, m)
        return theta, evaluation.outcomes(task, theta, episodes)

    _, after = iterate(objective, step, theta, jax.random.split(adaptation, steps))
    return jax.tree.map(lambda x, xs: jnp.append(x, xs), evaluation.outcomes(task, theta, episodes), after)


def deployed_step_size(algorithm: Algorithm, message: PyTree) -> Any:
    """Step size that agents personalize with; raise `UserError` if the algorithm has none."""
    alpha = algorithm.deployment_step_size(message)
    if alpha is None:
        raise UserError(f"{type(algorithm).__name__} has no adaptation step size alpha: say which to adapt with")
    return alpha


def stacked(f: Callable[[Any], Any], xs: Any) -> Any:
    """`jax.lax.map` for what JAX cannot trace."""
    return jax.tree.map(lambda *ys: np.stack(ys), *(f(x) for x in xs))
