"""The measurements and costs of a run, as arrays with labelled axes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
from jaxtyping import Float, Int, Shaped

SEED_AXIS = ("seeds", "before", "after", "held_out_before", "held_out_after", "outcomes")
OUTCOMES = "outcomes."


@dataclass(frozen=True)
class History:
    """Returns of every agent at every evaluated round, axes [seed, evaluation, agent], and the cost up to that round.

    `before` is J_i of the shared initialization, `after` that of the agent's personalized policy; the cost is
    cumulative and per agent: trajectories sampled, bytes received and sent. `outcomes` holds the tasks' other outcomes
    on the same axes, with the name of the return as a prefix, for example "after.success".
    """

    seeds: Int[np.ndarray, " seed"]
    rounds: Int[np.ndarray, " evaluation"]
    trajectories: Int[np.ndarray, " evaluation"]
    bytes: Int[np.ndarray, " evaluation"]
    before: Float[np.ndarray, "seed evaluation agent"]
    after: Float[np.ndarray, "seed evaluation agent"]
    held_out_before: Float[np.ndarray, "seed evaluation held_out"]
    held_out_after: Float[np.ndarray, "seed evaluation held_out"]
    outcomes: Mapping[str, Float[np.ndarray, "seed evaluation _"]] = field(default_factory=dict)

    def __repr__(self) -> str:
        seeds, evaluations, agents = self.after.shape
        counts = f"{seeds} seeds, {evaluations} evaluations up to round {self.rounds[-1]}, {agents} agents"
        return f"History({counts} and {self.held_out_after.shape[-1]} held out, outcomes {sorted(self.outcomes)})"

    def arrays(self) -> dict[str, np.ndarray]:
        """All arrays by name; names of outcomes get a prefix."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "outcomes"}
        return own | {OUTCOMES + name: x for name, x in self.outcomes.items()}

    @staticmethod
    def of(arrays: Mapping[str, np.ndarray]) -> "History":
        """Make a history from the result of `arrays`; a KeyError names a missing array."""
        own = {f.name: arrays[f.name] for f in fields(History) if f.name != "outcomes"}
        return History(**own, outcomes=_outcomes(arrays))

    def select(self, replicas: slice) -> "History":
        """The history of some of the replicas, that is, of some of the seeds."""
        return History.of({name: x[replicas] if _per_seed(name) else x for name, x in self.arrays().items()})

    def at(self, rounds: Sequence[int]) -> "History":
        """The evaluations after some of the rounds; a KeyError names a round that was not evaluated."""
        index = {int(round_): i for i, round_ in enumerate(self.rounds)}
        chosen = [index[round_] for round_ in rounds]
        kept = {
            name: x if name == "seeds" else np.take(x, chosen, int(_per_seed(name)))
            for name, x in self.arrays().items()
        }
        return History.of(kept)

    def extend(self, later: "History") -> "History":
        """Return this history followed by a later part of the same run."""
        added = later.arrays()
        return History.of(
            {
                name: x if name == "seeds" else np.concatenate([x, added[name]], axis=int(_per_seed(name)))
                for name, x in self.arrays().items()
            }
        )

    @staticmethod
    def join(parts: Sequence["History"]) -> "History":
        """Join histories of different seeds over the same rounds."""
        arrays = [part.arrays() for part in parts]
        return History.of(
            {name: np.concatenate([a[name] for a in arrays]) if _per_seed(name) else x for name, x in arrays[0].items()}
        )


@dataclass(frozen=True)
class Deployment:
    """Outcomes of agents that personalize the finished initialization, for several budgets of trajectories.

    The agents are the held-out ones, or the training agents of a fleet without held-out agents. `outcomes` ("return"
    and the tasks' other outcomes) are means over episodes; `rollouts` are the environment's observations in some
    episodes, if the evaluation asks for any. A saved run has the rollouts of its first seed only.
    """

    budgets: Int[np.ndarray, " budget"]
    outcomes: Mapping[str, Float[np.ndarray, "seed budget agent"]]
    rollouts: Shaped[np.ndarray, "shown budget agent episode ..."]

    def arrays(self) -> dict[str, np.ndarray]:
        """All arrays by name; names of outcomes get a prefix."""
        return {"budgets": self.budgets, "rollouts": self.rollouts} | {
            OUTCOMES + name: x for name, x in self.outcomes.items()
        }

    @staticmethod
    def of(arrays: Mapping[str, np.ndarray]) -> "Deployment":
        """Make a deployment from the result of `arrays`; a KeyError names a missing array."""
        return Deployment(arrays["budgets"], _outcomes(arrays), arrays["rollouts"])

    def select(self, replicas: slice) -> "Deployment":
        """The deployment of some of the replicas, with the rollouts of the first of them."""
        outcomes = {name: x[replicas] for name, x in self.outcomes.items()}
        return replace(self, outcomes=outcomes, rollouts=self.rollouts[replicas][:1])

    def at(self, outcome: str, budget: int) -> Float[np.ndarray, " seed"]:
        """The mean over agents of an outcome at one budget, for every seed."""
        (index,) = np.flatnonzero(self.budgets == budget)
        return self.outcomes[outcome][:, index].mean(axis=-1)


def _per_seed(name: str) -> bool:
    """Whether the first axis of an array is the seed axis."""
    return name.partition(".")[0] in SEED_AXIS


def _outcomes(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The outcomes among the arrays, without the prefix of their names."""
    return {name.removeprefix(OUTCOMES): arrays[name] for name in arrays if name.startswith(OUTCOMES)}
