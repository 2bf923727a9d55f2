"""From a fleet's returns to a verdict: whether agents need policies of their own, and which mechanism gives them."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Float, Int

from perfedrl.experiments.stats import Interval, mean_interval
from perfedrl.studies.diagnosis.returns import FleetReturns

NEGLIGIBLE = 0.05
"""The share of what learning is worth at all below which policies of one's own are not worth their trouble."""
WORTHWHILE = 0.5
"""The share of that gain which one gradient step must give for a recommendation."""
GROUPED = 0.25
"""The largest share of the loss by foreign policies that may remain where each group has one policy."""
MOST_GROUPS = 4

SHARED, ONE_STEP, CLUSTERS, FINE_TUNING = "shared", "one step", "clusters", "fine-tuning"


@dataclass(frozen=True)
class Verdict:
    """What the returns of a fleet say. Gains are means over agents, with 95 % intervals over seeds."""

    returns: FleetReturns

    @cached_property
    def scale(self) -> float:
        """What learning is worth: the mean return of the agents' best policies minus that of the untrained one."""
        return float(self.returns.own.mean() - self.returns.untrained.mean())

    @cached_property
    def gain(self) -> Interval:
        """What perfect personalization gains over one shared policy; a point where it was computed."""
        found = (self.returns.own - self.returns.shared).mean(axis=-1)
        return Interval(*[float(found[0])] * 3) if self.returns.exact else mean_interval(found)

    @cached_property
    def step_gains(self) -> dict[int, Interval]:
        """What one gradient step gains over the shared policy, by the number of trajectories of the agent's own."""
        return self._gains(self.returns.adapted)

    @cached_property
    def tuning_gains(self) -> dict[int, Interval]:
        """What several steps from the shared policy gain over it, by the number of trajectories of the agent's own."""
        return self._gains(self.returns.tuned)

    def _gains(self, after: Float[np.ndarray, "seed budget agent"]) -> dict[int, Interval]:
        by_budget = after.mean(axis=-1) - self.returns.shared.mean(axis=-1)[:, None]
        return {int(m): mean_interval(by_budget[:, i]) for i, m in enumerate(self.returns.budgets)}

    @property
    def needed(self) -> bool:
        """Whether personalization pays: its gain is more than a negligible share of what learning is worth."""
        return self.gain.low > 0 and self.gain.mean > NEGLIGIBLE * self.scale

    @cached_property
    def closed(self) -> dict[int, float]:
        """The share of the possible gain that one step gives, by budget."""
        return {m: gain.mean / self.gain.mean if self.gain.mean > 0 else 0.0 for m, gain in self.step_gains.items()}

    @cached_property
    def alone_from(self) -> dict[int, int | None]:
        """The trajectories from which on learning alone is better than one step, by the step's budget.

        None where it is not within the trajectories that were tried.
        """
        alone = self.returns.alone.mean(axis=(0, 2))
        found: dict[int, int | None] = {}
        for i, m in enumerate(self.returns.budgets):
            ahead = np.logical_and.accumulate((alone >= self.returns.adapted[:, i].mean())[::-1])[::-1]
            found[int(m)] = int(self.returns.spent[np.argmax(ahead)]) if ahead.any() else None
        return found

    @cached_property
    def losses(self) -> Float[np.ndarray, "agent agent"]:
        """What agent j loses by the policy of agent i instead of its own, as a share of what learning is worth to it.

        Losses are from 0 to 1: what is worse than the untrained policy counts as that.
        """
        transfer = self.returns.transfer.mean(axis=0)
        own, untrained = np.diagonal(transfer), self.returns.untrained.mean(axis=0)
        # To agents that have hardly anything to learn, noise would be a large loss.
        worth = np.maximum(own - untrained, NEGLIGIBLE * abs(self.scale) + np.finfo(float).tiny)
        return np.clip((own - transfer) / worth, 0.0, 1.0)

    @cached_property
    def groups(self) -> list[list[int]]:
        """Groups of agents of which one policy each serves all, the fewest that do; one group where there are none.

        Agents that need no policies of their own form one group.

        Agents form groups if the policy of one member costs the other members, in the mean, at most `GROUPED` of what
        the best single one of all policies costs the others, and if every group has at least two members.
        """
        n = self.returns.agents
        everyone = [list(range(n))]
        if not self.needed:
            return everyone
        total = loss_of(self.losses, everyone)
        for count in range(2, min(MOST_GROUPS, n // 2) + 1):
            groups = linked(self.losses, count)
            if min(map(len, groups)) > 1 and loss_of(self.losses, groups) <= GROUPED * total:
                return groups
        return everyone

    @property
    def recommendation(self) -> str:
        """The mechanism to use: one of the constants of this module.

        One step where it is worth its trouble and several steps are hardly better, in the mean over budgets.
        """
        if not self.needed:
            return SHARED
        one, several = (
            np.mean([gain.mean for gain in gains.values()]) for gains in (self.step_gains, self.tuning_gains)
        )
        if max(self.closed.values()) >= WORTHWHILE and several - one <= NEGLIGIBLE * self.scale:
            return ONE_STEP
        return CLUSTERS if len(self.groups) > 1 else FINE_TUNING


def loss_of(losses: Float[np.ndarray, "agent agent"], groups: list[list[int]]) -> float:
    """The mean loss where each group uses the policy of the member that is best for it, over all other members."""
    lost = sum(float(losses[np.ix_(group, group)].sum(axis=1).min()) for group in groups)
    return lost / (len(losses) - len(groups))


def linked(losses: Float[np.ndarray, "agent agent"], count: int) -> list[list[int]]:
    """Groups of agents by average linkage of their mutual losses."""
    from scipy.cluster.hierarchy import fcluster, linkage  # slow to import
    from scipy.spatial.distance import squareform

    mutual = (losses + losses.T) / 2
    labels: Int[np.ndarray, " agent"] = fcluster(
        linkage(squareform(mutual, checks=False), "average"), count, "maxclust"
    )
    members: list[Bool[np.ndarray, " agent"]] = [labels == label for label in np.unique(labels)]
    return sorted(np.flatnonzero(member).tolist() for member in members)
