"""Evaluations: measure an agent's parameters exactly, by Monte Carlo, or on test examples."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Float, PRNGKeyArray

from perfedrl.envs import Fleet, TabularMDP
from perfedrl.envs.base import DataTask, measured_task
from perfedrl.errors import UserError
from perfedrl.estimators import UNBIASED, Objective, Sampled, reward_to_go
from perfedrl.estimators.supervised import example_outcomes
from perfedrl.exact.lqr import check_start, is_lqr
from perfedrl.exact.tabular import Exact
from perfedrl.policies import Policy
from perfedrl.registry import registry
from perfedrl.rollout import check_episodes, outline, sampler
from perfedrl.types import Array, Params, Trajectory

Outcomes = dict[str, Float[Array, ""]]
"""Means over episodes by name; "return" is always one of them."""

MOST_EPISODES = 10_000_000


@runtime_checkable
class Evaluation(Protocol):
    """The interface of evaluations; an evaluation is a pytree, since it is an argument of compiled functions."""

    trajectories: int
    """The number of trajectories that an agent adapts with before it is measured."""
    few_shot: tuple[int, ...]
    """Numbers of trajectories to personalize with when the run is finished."""
    repeats: int
    """The number of personalizations for each entry of `few_shot`."""
    rollouts: int
    """The number of episodes to save for each personalized agent."""
    float64: bool
    """Whether agents are measured in double precision."""

    def objective(self, task: Any) -> Objective:
        """The objective that an agent adapts on."""
        ...

    def decisions(self, task: Any) -> int:
        """The number of decisions that are sampled to measure an agent."""
        ...

    def outcomes(self, task: Any, params: Params, key: PRNGKeyArray) -> Outcomes:
        """Measure parameters on a task."""
        ...

    def sample(self, task: Any, params: Params, key: PRNGKeyArray, m: int) -> Trajectory:
        """Draw m episodes to save."""
        ...


def check_budgets(trajectories: int, few_shot: Sequence[int], rollouts: int = 0, **counts: int) -> None:
    """Check that counts are in range and that the budgets in `few_shot` increase."""
    for name, count in [("trajectories", trajectories), ("rollouts", rollouts), *(("few_shot", m) for m in few_shot)]:
        if not 0 <= count <= MOST_EPISODES:
            raise UserError(f"evaluation: {name} must be from 0 to {MOST_EPISODES}, got {count}")
    for name, count in counts.items():
        if not 1 <= count <= MOST_EPISODES:
            raise UserError(f"evaluation: {name} must be from 1 to {MOST_EPISODES}, got {count}")
    if list(few_shot) != sorted(set(few_shot)):
        raise UserError(f"evaluation: few_shot must be an increasing list, got {list(few_shot)}")


class DynamicProgramming(eqx.Module):
    """Exact returns in float64, before and after adaptation by the exact gradient, as in the paper for tabular agents.

    The return of a linear-quadratic agent is minus its infinite-horizon cost, computed by its own recursion. With
    `agent`, adaptation uses sampled trajectories, as at deployment; the result is still measured exactly.
    """

    policy: Any
    agent: Sampled | None = None
    # Exact gradients use no trajectories; the number must only be large enough for an algorithm that adapts in several
    # steps and divides it among them.
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
    """Means over fresh episodes, before and after adaptation from fresh trajectories by the estimators of `agent`.

    Agents whose task says so are measured on another one than they adapt on, such as on other days of their data.

    For agents with examples instead of episodes: means over all of their test examples, which adaptation never uses.
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
            raise UserError("evaluation: rollouts are saved for the budgets in few_shot, which is empty; set few_shot")

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
        return sampler(measured_task(task), self.agent.policy).sample(params, key, m)


def episode_outcomes(task: Any, episodes: Trajectory) -> dict[str, Float[Array, " m"]]:
    """The return of every episode, and the task's other outcomes."""
    return {"return": reward_to_go(episodes, task.discount)[:, 0], **jax.vmap(task.outcomes)(episodes)}


def check_fit(task: Any, policy: Policy) -> Any:
    """Reject a policy that does not fit a task; return the shapes of an episode, or of outcomes of examples."""
    of_policy, of_task = declared_actions(policy), declared_actions(task)
    if of_policy and of_task and of_policy != of_task:
        raise UserError(f"the policy does not fit the fleet: it has {of_policy}, the agents have {of_task}")

    def sample(key: PRNGKeyArray) -> Any:
        params = policy.init(key)
        if isinstance(task, DataTask):
            return example_outcomes(policy, params, task.test)
        episodes = outline(task, policy).sample(params, key, 1)
        policy.log_prob(params, *jax.tree.map(lambda x: x[0, 0], (episodes.obs, episodes.action)))
        return episodes

    try:
        return jax.eval_shape(sample, jax.random.key(0))
    except (TypeError, ValueError, IndexError) as error:
        raise UserError(f"the policy does not fit the fleet: {str(error).partition(chr(10))[0]}") from error


def declared_actions(x: Any) -> dict[str, Any]:
    """The number of actions, or the length of an action vector, where a task or a policy declares it."""
    sizes = {"actions": x.actions, "action_size": x.action_size}
    return {name: size for name, size in sizes.items() if size is not None}


def check_estimates(fleet: Fleet, agent: Sampled, m: int) -> None:
    """Reject estimators that do not work with the policy or with curvature batches of m, without sampling."""
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
    """Exact returns of agents with finitely many states, and of linear-quadratic agents under linear feedback.

    Agents adapt by exact gradients, or from `trajectories` sampled trajectories if that is set. In the second case
    held-out agents of a finished run are also personalized from each number of trajectories in `few_shot`, `repeats`
    times each.
    """
    policy = agent.policy
    if fleet.sight is not None:
        raise UserError("exact evaluation does not know policies that see numbers of their task; take monte-carlo")
    if trajectories is None and few_shot:
        raise UserError(
            "evaluation: few_shot needs sampled adaptation, and exact steps use no trajectories; set trajectories = ..."
        )
    if trajectories is None and agent.forms.advantage.bias != UNBIASED:
        raise UserError(
            "evaluation: exact steps follow the gradient of the return, which these advantages do not estimate; set "
            "trajectories = ..., or take monte-carlo"
        )
    sampled = () if trajectories is None else (agent, trajectories, tuple(few_shot), repeats)
    if is_lqr(fleet, policy):
        check_start(fleet, policy)
        return DynamicProgramming(policy, *sampled)
    if not isinstance(fleet.train, TabularMDP) or policy.probabilities is None:
        raise UserError("exact evaluation needs agents with finitely many states and a policy that can be tabulated")
    params = jax.eval_shape(policy.init, jax.random.key(0))
    tabulated = jax.eval_shape(policy.probabilities, params).shape
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
    """Means over fresh episodes, before and after adaptation from `trajectories` trajectories.

    Held-out agents of a finished run are also personalized from each number of trajectories in `few_shot`, `repeats`
    times each; `rollouts` episodes of the last repeat are saved.
    """
    check_episodes(fleet.train)
    episodes_shape = check_fit(fleet.task(0), agent.policy)
    if rollouts and not isinstance(episodes_shape.obs, jax.ShapeDtypeStruct):
        raise UserError("evaluation: rollouts need observations that are one array, and these are not; leave them out")
    return MonteCarlo(agent, trajectories, episodes, tuple(few_shot), repeats, rollouts)


def on_examples(
    fleet: Fleet, agent: Sampled, examples: int = 100, few_shot: Sequence[int] = (), repeats: int = 1
) -> MonteCarlo:
    """Means over each agent's test examples, before and after adaptation from `examples` training examples.

    "return" is the mean log-likelihood of the labels. `few_shot` lists numbers of examples from which agents are
    personalized when a run is finished, `repeats` times each.
    """
    if not isinstance(fleet.train, DataTask):
        raise UserError(
            "the evaluation 'examples' needs agents with examples, and these play episodes; use 'monte-carlo'"
        )
    check_fit(fleet.task(0), agent.policy)
    return MonteCarlo(agent, examples, fleet.train.test.labels.shape[1], tuple(few_shot), repeats)


def auto(fleet: Fleet, agent: Sampled) -> DynamicProgramming | MonteCarlo:
    """The evaluation that fits the fleet, with its defaults.

    Exact for agents with finitely many states and for linear-quadratic agents, on test examples for agents with
    examples, and by Monte Carlo for all others and for advantages whose gradient is biased.
    """
    if isinstance(fleet.train, DataTask):
        return on_examples(fleet, agent)
    finite = isinstance(fleet.train, TabularMDP) and agent.policy.probabilities is not None
    unbiased = agent.forms.advantage.bias == UNBIASED
    fits = unbiased and (finite or is_lqr(fleet, agent.policy))
    return exact(fleet, agent) if fits else monte_carlo(fleet, agent)


EVALUATIONS = registry("evaluation", auto=auto, exact=exact, examples=on_examples, monte_carlo=monte_carlo)
