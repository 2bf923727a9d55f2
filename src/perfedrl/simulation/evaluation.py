"""What an agent's parameters are worth to it: exactly, by Monte Carlo, or on examples."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Float, PRNGKeyArray

from perfedrl.envs import Fleet, TabularMDP
from perfedrl.envs.base import DataTask
from perfedrl.errors import UserError
from perfedrl.estimators import Objective, Sampled, reward_to_go
from perfedrl.estimators.supervised import example_outcomes
from perfedrl.exact.lqr import check_start, is_lqr
from perfedrl.exact.tabular import Exact
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
    repeats: int
    """How often each."""
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

    def sample(self, task: Any, params: Params, key: PRNGKeyArray, m: int) -> Trajectory:
        """Draw m episodes, to keep."""
        ...


def check_budgets(trajectories: int, few_shot: Sequence[int], rollouts: int = 0, **counts: int) -> None:
    """Refuse numbers of trajectories and episodes that are none, and budgets that do not rise."""
    for name, count in [("trajectories", trajectories), ("rollouts", rollouts), *(("few_shot", m) for m in few_shot)]:
        if not 0 <= count <= MOST_EPISODES:
            raise UserError(f"evaluation: {name} must be from 0 to {MOST_EPISODES}; it is {count}")
    for name, count in counts.items():
        if not 1 <= count <= MOST_EPISODES:
            raise UserError(f"evaluation: {name} must be from 1 to {MOST_EPISODES}; it is {count}")
    if list(few_shot) != sorted(set(few_shot)):
        raise UserError(f"evaluation: few_shot must be a rising list; it is {list(few_shot)}")


class DynamicProgramming(eqx.Module):
    """Exact returns in float64, after adaptation by the exact gradient: the paper's measure for tabular agents.

    Of linear-quadratic agents minus the infinite-horizon cost, which another recursion gives. With `agent`, adaptation
    is from trajectories, as an agent's is, and what comes of it still measured exactly.
    """

    policy: Any
    agent: Sampled | None = None
    # Exact gradients take no trajectories; an algorithm of several steps may share out as many as it likes.
    trajectories: int = eqx.field(static=True, default=1_000_000)
    few_shot: tuple[int, ...] = eqx.field(static=True, default=(), converter=tuple)
    repeats: int = eqx.field(static=True, default=1)

    rollouts, float64 = 0, True

    def __check_init__(self) -> None:
        check_budgets(self.trajectories, self.few_shot, repeats=self.repeats)

    def objective(self, task: Any) -> Objective:
        return Exact(self.policy)(task) if self.agent is None else self.agent(task)

    def decisions(self, task: Any) -> int:
        return 0 if self.agent is None else self.trajectories * (task.horizon + 1)

    def outcomes(self, task: Any, params: Params, key: PRNGKeyArray) -> Outcomes:
        return {"return": Exact(self.policy)(task).value(params, key, 1)}

    def sample(self, task: Any, params: Params, key: PRNGKeyArray, m: int) -> Trajectory:
        """Draw m episodes."""
        return sampler(task, self.policy).sample(params, key, m)


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
        check_budgets(self.trajectories, self.few_shot, self.rollouts, episodes=self.episodes, repeats=self.repeats)
        if self.rollouts and not self.few_shot:
            raise UserError("evaluation: rollouts are kept of the budgets in few_shot, and there are none")

    def objective(self, task: Any) -> Objective:
        return self.agent(task)

    def decisions(self, task: Any) -> int:
        return (self.trajectories + 2 * self.episodes) * (task.horizon + 1)

    def outcomes(self, task: Any, params: Params, key: PRNGKeyArray) -> Outcomes:
        if isinstance(task, DataTask):
            measured = example_outcomes(self.agent.policy, params, task.test)
        else:
            measured = episode_outcomes(task, self.sample(task, params, key, self.episodes))
        return {name: jnp.mean(x) for name, x in measured.items()}

    def sample(self, task: Any, params: Params, key: PRNGKeyArray, m: int) -> Trajectory:
        """Draw m episodes."""
        return sampler(task, self.agent.policy).sample(params, key, m)


def episode_outcomes(task: Any, episodes: Trajectory) -> dict[str, Float[Array, " m"]]:
    """The return of every episode, and what else the task says of it."""
    return {"return": reward_to_go(episodes, task.discount)[:, 0], **jax.vmap(task.outcomes)(episodes)}


def check_fit(task: Any, policy: Policy) -> Any:
    """Refuse a policy that cannot play a task; return the shapes of an episode, or of outcomes of examples."""
    taken, needed = declared_actions(policy), declared_actions(task)
    if taken and needed and taken != needed:
        raise UserError(f"the policy does not fit the fleet: it has {taken}, the agents have {needed}")
    one = lambda x: x[0, 0]  # noqa: E731

    def sample(key: PRNGKeyArray) -> Any:
        params = policy.init(key)
        if isinstance(task, DataTask):
            return example_outcomes(policy, params, task.test)
        played = outline(task, policy).sample(params, key, 1)
        policy.log_prob(params, *jax.tree.map(one, (played.obs, played.action)))
        return played

    try:
        return jax.eval_shape(sample, jax.random.key(0))
    except (TypeError, ValueError, IndexError) as error:
        raise UserError(f"the policy does not fit the fleet: {str(error).partition(chr(10))[0]}") from error


def declared_actions(x: Any) -> dict[str, Any]:
    """What a task or a policy declares of its actions: their number, or the length of a vector."""
    sizes = {"actions": x.actions, "action_size": x.action_size}
    return {name: size for name, size in sizes.items() if size is not None}


def check_estimates(fleet: Fleet, agent: Sampled, m: int) -> None:
    """Refuse estimators that cannot work with the policy, or with curvature batches of m; nothing is sampled."""
    check_fit(fleet.task(0), agent.policy)
    objective, key = agent.outline(fleet.task(0)), jax.random.key(0)
    theta = jax.eval_shape(agent.policy.init, key)
    jax.eval_shape(lambda t: (objective.gradient(t, key, 2), objective.curvature(t, t, key, m)), theta)


def exact(
    fleet: Fleet,
    agent: Sampled,
    trajectories: int | None = None,
    few_shot: Sequence[int] = (),
    repeats: int = 1,
) -> DynamicProgramming:
    """Exact returns, for agents with finitely many states, and costs of linear-quadratic ones under linear feedback.

    Agents adapt by exact gradients, or, where `trajectories` says from how many, from sampled ones. Then the held-out
    agents of a finished run are also personalized from each number in `few_shot`, `repeats` times each.
    """
    policy = agent.policy
    if trajectories is None and few_shot:
        raise UserError("evaluation: few_shot needs trajectories = ..., from which agents adapt; exact steps take none")
    sampled = () if trajectories is None else (agent, trajectories, tuple(few_shot), repeats)
    if is_lqr(fleet, policy):
        check_start(fleet, policy)
        return DynamicProgramming(policy, *sampled)
    if not isinstance(fleet.train, TabularMDP) or policy.probabilities is None:
        raise UserError("exact evaluation needs agents with finitely many states and a policy that can be tabulated")
    tabulated = jax.eval_shape(policy.probabilities, policy.init(jax.random.key(0))).shape
    if tabulated != fleet.train.r.shape[1:]:
        raise UserError(f"the policy is for {tabulated} states and actions, the fleet has {fleet.train.r.shape[1:]}")
    return DynamicProgramming(policy, *sampled)


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
    if rollouts and not isinstance(played.obs, jax.ShapeDtypeStruct):
        raise UserError("evaluation: rollouts are kept of observations that are one array, and these are not")
    return MonteCarlo(agent, trajectories, episodes, tuple(few_shot), repeats, rollouts)


def on_examples(
    fleet: Fleet, agent: Sampled, examples: int = 100, few_shot: Sequence[int] = (), repeats: int = 1
) -> MonteCarlo:
    """Means over each agent's test examples, after adaptation from `examples` of the others.

    "return" is the mean log-likelihood of the labels. `few_shot` are numbers of examples to personalize from when a
    run is finished, `repeats` times each.
    """
    if not isinstance(fleet.train, DataTask):
        raise UserError("the evaluation 'examples' is for agents that have examples; these play: 'monte-carlo'")
    check_fit(fleet.task(0), agent.policy)
    return MonteCarlo(agent, examples, fleet.train.test.labels.shape[1], tuple(few_shot), repeats)


def auto(fleet: Fleet, agent: Sampled) -> DynamicProgramming | MonteCarlo:
    """Exact where agents have finitely many states or are linear-quadratic, on test examples where they have such.

    Monte Carlo with its defaults elsewhere.
    """
    if isinstance(fleet.train, DataTask):
        return on_examples(fleet, agent)
    finite = isinstance(fleet.train, TabularMDP) and agent.policy.probabilities is not None
    return exact(fleet, agent) if finite or is_lqr(fleet, agent.policy) else monte_carlo(fleet, agent)


EVALUATIONS = registry("evaluation", auto=auto, exact=exact, examples=on_examples, monte_carlo=monte_carlo)
