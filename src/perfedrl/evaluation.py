"""How a run is measured: every agent before and after its adaptation, exactly or by Monte Carlo."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, PRNGKeyArray, PyTree

from perfedrl.algorithms import Algorithm
from perfedrl.algorithms.wrapping import with_own
from perfedrl.envs import Fleet, TabularMDP
from perfedrl.envs.fleet import brings_examples
from perfedrl.errors import UserError
from perfedrl.estimators import Objective, Sampled, adapt, reward_to_go
from perfedrl.estimators.meta import iterate
from perfedrl.estimators.supervised import example_outcomes
from perfedrl.exact import Exact
from perfedrl.exact_lqr import check_start, is_lqr
from perfedrl.policies import Policy
from perfedrl.registry import registry
from perfedrl.rollout import check_episodes, outline, sampler
from perfedrl.types import Array, Params, Trajectory

Outcomes = dict[str, Float[Array, ""]]
"""Means over episodes by name; "return" is always there."""

MOST_EPISODES = 10_000_000


@runtime_checkable
class Evaluation(Protocol):
    """What an agent's parameters are worth to it. A pytree, like all that enters a compiled program."""

    trajectories: int
    """Those that an agent adapts with before it is measured."""
    few_shot: tuple[int, ...]
    """Numbers of trajectories to personalize with when the run is finished."""
    rollouts: int
    """Episodes to keep of each agent that was personalized."""
    float64: bool

    def objective(self, task: Any) -> Objective:
        """What an agent adapts on."""
        ...

    def decisions(self, task: Any) -> int:
        """How many decisions it takes to measure an agent."""
        ...

    def outcomes(self, task: Any, params: Params, key: PRNGKeyArray) -> Outcomes: ...


class DynamicProgramming(eqx.Module):
    """Exact returns in float64, after adaptation by the exact gradient: the paper's measure for tabular agents.

    Of linear-quadratic agents minus the infinite-horizon cost, which another recursion gives.
    """

    policy: Any

    # Exact gradients take no trajectories; an algorithm of several steps may share out as many as it likes.
    trajectories, few_shot, rollouts, float64 = 1_000_000, (), 0, True

    def objective(self, task: Any) -> Objective:
        return Exact(self.policy)(task)

    def decisions(self, task: Any) -> int:
        return 0

    def outcomes(self, task: Any, params: Params, key: PRNGKeyArray) -> Outcomes:
        return {"return": self.objective(task).value(params, key, 1)}


class MonteCarlo(eqx.Module):
    """Means over fresh episodes, after adaptation from fresh trajectories by the estimators of `agent`.

    Where agents have examples instead, over all that they keep for a test: no adaptation draws from those.
    """

    agent: Sampled
    trajectories: int = eqx.field(static=True, default=256)
    episodes: int = eqx.field(static=True, default=512)
    few_shot: tuple[int, ...] = eqx.field(static=True, default=(), converter=tuple)
    repeats: int = eqx.field(static=True, default=1)
    rollouts: int = eqx.field(static=True, default=0)

    float64 = False

    def __check_init__(self) -> None:
        named = [("trajectories", self.trajectories), ("rollouts", self.rollouts)]
        for name, count in [*named, *(("few_shot", m) for m in self.few_shot)]:
            if not 0 <= count <= MOST_EPISODES:
                raise UserError(f"evaluation: {name} must be from 0 to {MOST_EPISODES}; it is {count}")
        for name, count in (("episodes", self.episodes), ("repeats", self.repeats)):
            if not 1 <= count <= MOST_EPISODES:
                raise UserError(f"evaluation: {name} must be from 1 to {MOST_EPISODES}; it is {count}")
        if list(self.few_shot) != sorted(set(self.few_shot)):
            raise UserError(f"evaluation: few_shot must be a rising list; it is {list(self.few_shot)}")
        if self.rollouts and not self.few_shot:
            raise UserError("evaluation: rollouts are kept of the budgets in few_shot, and there are none")

    def objective(self, task: Any) -> Objective:
        return self.agent(task)

    def decisions(self, task: Any) -> int:
        return (self.trajectories + 2 * self.episodes) * (task.horizon + 1)

    def outcomes(self, task: Any, params: Params, key: PRNGKeyArray) -> Outcomes:
        if brings_examples(task):
            measured = example_outcomes(self.agent.policy, params, task.test)
        else:
            measured = episode_outcomes(task, self.sample(task, params, key, self.episodes))
        return {name: jnp.mean(x) for name, x in measured.items()}

    def sample(self, task: Any, params: Params, key: PRNGKeyArray, m: int) -> Trajectory:
        """Draw m episodes."""
        return sampler(task, self.agent.policy).sample(params, key, m)


def episode_outcomes(task: Any, episodes: Trajectory) -> dict[str, Float[Array, " m"]]:
    """The return of every episode, and what else the task says of it."""
    more = jax.vmap(task.outcomes)(episodes) if hasattr(task, "outcomes") else {}
    return {"return": reward_to_go(episodes, task.discount)[:, 0], **more}


def before_and_after(
    evaluation: Evaluation, algorithm: Algorithm, message: PyTree, client: PyTree, task: Any, key: PRNGKeyArray
) -> dict[str, Outcomes]:
    """One agent's outcomes under the shared parameters, with what is its own of them, and after adaptation.

    Both are measured with the same uniforms, so that what adaptation gains is less noisy than either.
    """
    adaptation, episodes = jax.random.split(key)
    own = algorithm.personalize(message, client, evaluation.objective(task), adaptation, evaluation.trajectories)
    measure = lambda params: evaluation.outcomes(task, params, episodes)  # noqa: E731
    return {"before": measure(algorithm.shared(with_own(algorithm, message, client))), "after": measure(own)}


def deploy(
    evaluation: MonteCarlo, algorithm: Algorithm, message: PyTree, client: PyTree, task: Any, key: PRNGKeyArray
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
    theta = algorithm.shared(with_own(algorithm, message, client))
    by = deployed_step_size(algorithm, message) if alpha is None else alpha

    def step(theta: Params, key: PRNGKeyArray) -> tuple[Params, Outcomes]:
        theta = adapt(objective, theta, by, key, m)
        return theta, evaluation.outcomes(task, theta, episodes)

    _, after = iterate(objective, step, theta, jax.random.split(adaptation, steps))
    return jax.tree.map(lambda x, xs: jnp.append(x, xs), evaluation.outcomes(task, theta, episodes), after)


def deployed_step_size(algorithm: Algorithm, message: PyTree) -> Any:
    """The step size that agents personalize with."""
    own = getattr(algorithm, "deployed_step_size", None)
    alpha = getattr(algorithm, "alpha", None) if own is None else own(message)
    if alpha is None:
        raise UserError(f"{type(algorithm).__name__} has no adaptation step size alpha: say which to adapt with")
    return alpha


def stacked(f: Callable[[Any], Any], xs: Any) -> Any:
    """`jax.lax.map` for what JAX cannot trace."""
    return jax.tree.map(lambda *ys: np.stack(ys), *(f(x) for x in xs))


def check_fit(task: Any, policy: Policy) -> Any:
    """Refuse a policy that cannot play a task; return the shapes of an episode, or of outcomes of examples."""
    taken, needed = (
        {name: getattr(x, name) for name in ("actions", "action_size") if hasattr(x, name)} for x in (policy, task)
    )
    if taken and needed and taken != needed:
        raise UserError(f"the policy does not fit the fleet: it has {taken}, the agents have {needed}")
    one = lambda x: x[0, 0]  # noqa: E731

    def sample(key: PRNGKeyArray) -> Any:
        params = policy.init(key)
        if brings_examples(task):
            return example_outcomes(policy, params, task.test)
        played = outline(task, policy).sample(params, key, 1)
        policy.log_prob(params, *jax.tree.map(one, (played.obs, played.action)))
        return played

    try:
        return jax.eval_shape(sample, jax.random.key(0))
    except (TypeError, ValueError, IndexError) as error:
        raise UserError(f"the policy does not fit the fleet: {str(error).partition(chr(10))[0]}") from error


def check_estimates(fleet: Fleet, agent: Sampled, m: int) -> None:
    """Refuse estimators that cannot work with the policy, or with curvature batches of m; nothing is sampled."""
    check_fit(fleet.task(0), agent.policy)
    objective, key = agent.outline(fleet.task(0)), jax.random.key(0)
    theta = jax.eval_shape(agent.policy.init, key)
    jax.eval_shape(lambda t: (objective.gradient(t, key, 2), objective.curvature(t, t, key, m)), theta)


def exact(fleet: Fleet, agent: Sampled) -> DynamicProgramming:
    """Exact returns, for agents with finitely many states, and costs of linear-quadratic ones under linear feedback."""
    policy = agent.policy
    if is_lqr(fleet, policy):
        check_start(fleet, policy)
        return DynamicProgramming(policy)
    if not isinstance(fleet.train, TabularMDP) or not hasattr(policy, "probabilities"):
        raise UserError("exact evaluation needs agents with finitely many states and a policy that can be tabulated")
    tabulated = jax.eval_shape(policy.probabilities, policy.init(jax.random.key(0))).shape
    if tabulated != fleet.train.r.shape[1:]:
        raise UserError(f"the policy is for {tabulated} states and actions, the fleet has {fleet.train.r.shape[1:]}")
    return DynamicProgramming(policy)


def monte_carlo(
    fleet: Fleet,
    agent: Sampled,
    trajectories: int = 256,
    episodes: int = 512,
    few_shot: Sequence[int] = (),
    repeats: int = 1,
    rollouts: int = 0,
) -> MonteCarlo:
    """Means over fresh episodes, after adaptation from `trajectories` trajectories.

    When a run is finished its held-out agents are also personalized from each number of trajectories in `few_shot`,
    `repeats` times each; of the last time `rollouts` episodes are kept.
    """
    check_episodes(fleet.train)
    played = check_fit(fleet.task(0), agent.policy)
    if rollouts and not hasattr(played.obs, "shape"):
        raise UserError("evaluation: rollouts are kept of observations that are one array, and these are not")
    return MonteCarlo(agent, trajectories, episodes, tuple(few_shot), repeats, rollouts)


def on_examples(
    fleet: Fleet, agent: Sampled, examples: int = 100, few_shot: Sequence[int] = (), repeats: int = 1
) -> MonteCarlo:
    """Means over each agent's test examples, after adaptation from `examples` of the others.

    "return" is the mean log-likelihood of the labels. `few_shot` are numbers of examples to personalize from when a
    run is finished, `repeats` times each.
    """
    if not brings_examples(fleet.train):
        raise UserError("the evaluation 'examples' is for agents that have examples; these play: 'monte-carlo'")
    check_fit(fleet.task(0), agent.policy)
    return MonteCarlo(agent, examples, fleet.train.test.labels.shape[1], tuple(few_shot), repeats)


def auto(fleet: Fleet, agent: Sampled) -> DynamicProgramming | MonteCarlo:
    """Exact where agents have finitely many states or are linear-quadratic, on test examples where they have such.

    Monte Carlo with its defaults elsewhere.
    """
    if brings_examples(fleet.train):
        return on_examples(fleet, agent)
    finite = isinstance(fleet.train, TabularMDP) and hasattr(agent.policy, "probabilities")
    return exact(fleet, agent) if finite or is_lqr(fleet, agent.policy) else monte_carlo(fleet, agent)


EVALUATIONS = registry("evaluation", auto=auto, exact=exact, examples=on_examples, monte_carlo=monte_carlo)
