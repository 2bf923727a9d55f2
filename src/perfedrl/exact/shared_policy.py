"""The best policy that all tabular agents share, without knowing which agent they are, and returns of such policies.

Policies here are deterministic and may depend on the step: an array of actions [H + 1, S]. Among all memoryless
policies one of these is best for a fleet, since an episode visits a step once, so that the mean return is linear in the
probabilities of each step and state.
"""

import jax
import numpy as np
from jaxtyping import Float, Int

from perfedrl.envs import TabularMDP
from perfedrl.exact.tabular import best_response, stacked

Actions = Int[np.ndarray, "T S"]
"""An action for every step and state."""


class _Fleet:
    """The arrays of all agents in float64, for backups of values and for the spread of states."""

    def __init__(self, mdps: TabularMDP):
        self.successor = np.asarray(mdps.successor)
        self.probability = np.asarray(mdps.probability, np.float64)
        self.r, self.mu = np.asarray(mdps.r, np.float64), np.asarray(mdps.mu, np.float64)
        self.discount, self.steps = float(mdps.discount), int(mdps.horizon) + 1
        self.agents, self.states = self.mu.shape

    def action_values(self, later: Float[np.ndarray, "n S"]) -> Float[np.ndarray, "n S A"]:
        """Q of one step, from the values of the next."""
        agent = np.arange(self.agents)[:, None, None, None]
        return self.r + self.discount * np.sum(self.probability * later[agent, self.successor], axis=-1)

    def chosen(self, q: Float[np.ndarray, "n S A"], actions: Int[np.ndarray, " S"]) -> Float[np.ndarray, "n S"]:
        """The values of the chosen actions."""
        return q[:, np.arange(self.states), actions]

    def visits(self, policy: Actions) -> Float[np.ndarray, "T n S"]:
        """The distribution of each agent's state at every step."""
        found = [self.mu]
        for actions in policy[:-1]:
            states = np.arange(self.states)
            to, share = self.successor[:, states, actions], self.probability[:, states, actions]
            following = np.zeros_like(self.mu)
            np.add.at(following, (np.arange(self.agents)[:, None, None], to), found[-1][..., None] * share)
            found.append(following)
        return np.stack(found)

    def returns(self, policy: Actions) -> Float[np.ndarray, " n"]:
        """The expected return of every agent."""
        later = np.zeros_like(self.mu)
        for actions in policy[::-1]:
            later = self.chosen(self.action_values(later), actions)
        return np.sum(self.mu * later, axis=-1)

    def improved(self, policy: Actions) -> Actions:
        """Choose, from the last step to the first, the actions that are best for the mean of the agents.

        A step's states are spread as the earlier actions of `policy` spread them, and its values are those of the later
        actions that were just chosen, so no choice lowers the mean return. States that nobody visits keep their action.
        """
        visits, later, new = self.visits(policy), np.zeros_like(self.mu), policy.copy()
        for t in reversed(range(self.steps)):
            q = self.action_values(later)
            score = np.sum(visits[t][..., None] * q, axis=0)
            best, kept = score.argmax(axis=-1), policy[t]
            gain = score.max(axis=-1) - score[np.arange(self.states), kept]
            new[t] = np.where(gain > 1e-12 * (1 + np.abs(score).max()), best, kept)
            later = self.chosen(q, new[t])
        return new


def returns_of_actions(mdps: TabularMDP, policy: Actions) -> Float[np.ndarray, " n"]:
    """Compute the expected return of every agent under actions that depend on step and state."""
    return _Fleet(stacked(mdps)).returns(policy)


def best_responses(mdps: TabularMDP) -> list[Actions]:
    """Compute an optimal policy of each agent by dynamic programming."""
    tasks = stacked(mdps)
    one = [_agent(tasks, i) for i in range(len(tasks.mu))]
    return [np.asarray(best_response(mdp)) for mdp in one]


def best_shared_policy(mdps: TabularMDP) -> Actions:
    """Compute a policy that no change in a single step improves for the mean of the agents.

    It is the best one that improvement step by step reaches from the agents' own optima. The best of all is hard to
    find: agents do not know who they are, which makes the fleet one partially observed problem.
    """
    fleet, found = _Fleet(stacked(mdps)), []
    for policy in best_responses(mdps):
        while not np.array_equal(new := fleet.improved(policy), policy):
            policy = new
        found.append(policy)
    return max(found, key=lambda policy: float(fleet.returns(policy).mean()))


def _agent(tasks: TabularMDP, i: int) -> TabularMDP:
    """One agent of a stack."""
    return jax.tree.map(lambda x: x[i], tasks)
