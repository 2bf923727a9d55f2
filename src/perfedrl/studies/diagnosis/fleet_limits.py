"""What one shared policy and a policy of its own are worth to each agent: computed if possible, else trained."""

import numpy as np

from perfedrl.envs import Fleet, TabularMDP
from perfedrl.exact.lqr import average_optimal_gain, cost, optimal_gain, systems
from perfedrl.exact.shared_policy import best_responses, best_shared_policy, returns_of_actions
from perfedrl.studies.diagnosis.returns import Arrays
from perfedrl.types import Params


def tabular_limits(fleet: Fleet) -> Arrays:
    """Compute the returns of each agent's optimal policy on all agents, and of one policy for all.

    Policies may depend on the step of an episode. The shared one cannot be improved in any single step.
    """
    own = np.stack([returns_of_actions(fleet.train, policy) for policy in best_responses(fleet.train)])
    shared = returns_of_actions(fleet.train, best_shared_policy(fleet.train))
    return {"shared": shared[None], "own": np.diagonal(own)[None], "transfer": own[None]}


def linear_quadratic_limits(fleet: Fleet, policy: Params) -> Arrays:
    """Compute minus the costs of each agent's optimal gain on all agents, and of the best gain for all.

    A gain that does not stabilize an agent has minus infinity there.
    """
    tasks = systems(fleet)
    gains = [optimal_gain(task) for task in tasks]
    own = -np.asarray([[cost(task, gain) for task in tasks] for gain in gains])
    best = average_optimal_gain(tasks, np.asarray(policy))
    shared = -np.asarray([cost(task, best) for task in tasks])
    return {"shared": shared[None], "own": np.diagonal(own)[None], "transfer": own[None]}


def is_tabular(fleet: Fleet) -> bool:
    """Whether the agents have finitely many states and actions."""
    return isinstance(fleet.train, TabularMDP)


def trained_limits(shared: Arrays, specialists: list[Arrays]) -> Arrays:
    """The returns of trained policies: one for all, the best for each agent, and of each agent's policy on all.

    An agent's own policy is the better of two, trained from scratch and from the shared one. The best for an agent is
    the best of all policies, its own or not. Both choices are made by other episodes than those that measure it.
    """
    rows = np.arange(len(shared["measured"]))

    def better(found: Arrays, agent: int) -> tuple[np.ndarray, np.ndarray]:
        """The policy that is better for its agent, seed by seed: its returns on all agents at both moments."""
        both = [(found[f"measured from {x}"], found[f"chosen by from {x}"]) for x in ("scratch", "shared")]
        best = np.argmax([chosen[:, agent] for _, chosen in both], axis=0)
        measured, chosen = (np.stack(x)[best, rows] for x in zip(*both, strict=True))
        return measured, chosen

    measured, chosen = (
        np.stack(x, axis=1) for x in zip(*map(better, specialists, range(len(specialists))), strict=True)
    )
    candidates = np.concatenate([measured, shared["measured"][:, None]], axis=1)
    by = np.concatenate([chosen, shared["chosen by"][:, None]], axis=1)
    best = np.argmax(by, axis=1)[:, None]
    own = np.take_along_axis(candidates, best, axis=1)[:, 0]
    return {"shared": shared["measured"], "own": own, "transfer": measured}


def train_limits(shared: Arrays, specialists: list[Arrays]) -> Arrays:
    """The limits of a fleet whose policies are trained, and the curve of agents that learn alone."""
    found = trained_limits(shared, specialists)
    alone = np.stack([one["alone"] for one in specialists], axis=-1)
    return {**found, "untrained": shared["untrained"], "alone": alone, "spent": specialists[0]["spent"]}
