"""What one run measured, on labelled axes, with what it cost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
from jaxtyping import Float, Int, Shaped

SEED_AXIS = ("seeds", "before", "after", "held_out_before", "held_out_after", "outcomes")
OUTCOMES = "outcomes."


@dataclass(frozen=True)
class History:
    """Returns of every agent at every evaluated round, axes [seed, evaluation, agent], and the cost up to there.

    `before` is J_i of the shared initialization, `after` that of the agent's personalized policy; the cost is
    cumulative and per agent: trajectories sampled, bytes received and sent. `outcomes` holds what else the tasks say
    of an episode, on the same axes and named after the return beside it: "after.success", say.
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

    def arrays(self) -> dict[str, np.ndarray]:
        """Everything as plain arrays by name; the outcomes' names get a prefix."""
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "outcomes"}
        return plain | {OUTCOMES + name: x for name, x in self.outcomes.items()}

    @staticmethod
    def of(arrays: Mapping[str, np.ndarray]) -> "History":
        """The history that `arrays` came from; a KeyError names what is missing."""
        plain = {f.name: arrays[f.name] for f in fields(History) if f.name != "outcomes"}
        return History(**plain, outcomes=_outcomes(arrays))

    def select(self, lanes: slice) -> "History":
        """The history of some of the seeds."""
        picked = {name: x[lanes] if _per_seed(name) else x for name, x in self.arrays().items()}
        return History.of(picked)

    def extend(self, later: "History") -> "History":
        """Return this history followed by a later part of the same run."""
        more = later.arrays()
        return History.of(
            {
                name: x if name == "seeds" else np.concatenate([x, more[name]], axis=int(_per_seed(name)))
                for name, x in self.arrays().items()
            }
        )

    @staticmethod
    def join(parts: Sequence["History"]) -> "History":
        """Histories of different seeds over the same rounds, side by side."""
        arrays = [part.arrays() for part in parts]
        return History.of(
            {name: np.concatenate([a[name] for a in arrays]) if _per_seed(name) else x for name, x in arrays[0].items()}
        )


@dataclass(frozen=True)
class Deployment:
    """What the finished initialization is worth to the agents it is for, by the trajectories they personalize with.

    These are the held-out agents, or the training agents where none are held out. `outcomes` ("return", and what else
    the tasks say) are means over episodes; `rollouts` are some episodes, as observations, if any were asked for. A
    saved run keeps those of its first seed.
    """

    budgets: Int[np.ndarray, " budget"]
    outcomes: Mapping[str, Float[np.ndarray, "seed budget agent"]]
    rollouts: Shaped[np.ndarray, "shown budget agent episode ..."]

    def arrays(self) -> dict[str, np.ndarray]:
        """Everything as plain arrays by name."""
        return {"budgets": self.budgets, "rollouts": self.rollouts} | {
            OUTCOMES + name: x for name, x in self.outcomes.items()
        }

    @staticmethod
    def of(arrays: Mapping[str, np.ndarray]) -> "Deployment":
        """The deployment that `arrays` came from; a KeyError names what is missing."""
        return Deployment(arrays["budgets"], _outcomes(arrays), arrays["rollouts"])

    def select(self, lanes: slice) -> "Deployment":
        """The deployment of some of the seeds, with the rollouts of the first of them."""
        outcomes = {name: x[lanes] for name, x in self.outcomes.items()}
        return replace(self, outcomes=outcomes, rollouts=self.rollouts[lanes][:1])

    def at(self, outcome: str, budget: int) -> Float[np.ndarray, " seed"]:
        """An outcome at one budget, the mean over agents, seed by seed."""
        (where,) = np.flatnonzero(self.budgets == budget)
        return self.outcomes[outcome][:, where].mean(axis=-1)


def _per_seed(name: str) -> bool:
    return name.partition(".")[0] in SEED_AXIS


def _outcomes(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name.removeprefix(OUTCOMES): arrays[name] for name in arrays if name.startswith(OUTCOMES)}
