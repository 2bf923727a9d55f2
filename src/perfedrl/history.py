"""What one run measured, on labelled axes, with what it cost."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from jaxtyping import Float, Int


@dataclass(frozen=True)
class History:
    """Returns of every agent at every evaluated round, axes [seed, evaluation, agent], and the cost up to there.

    `before` is J_i of the shared initialization, `after` that of the agent's personalized policy; the cost is
    cumulative and per agent: trajectories sampled, bytes received and sent.
    """

    seeds: Int[np.ndarray, " seed"]
    rounds: Int[np.ndarray, " evaluation"]
    trajectories: Int[np.ndarray, " evaluation"]
    bytes: Int[np.ndarray, " evaluation"]
    before: Float[np.ndarray, "seed evaluation agent"]
    after: Float[np.ndarray, "seed evaluation agent"]
    held_out_before: Float[np.ndarray, "seed evaluation held_out"]
    held_out_after: Float[np.ndarray, "seed evaluation held_out"]

    def arrays(self) -> dict[str, np.ndarray]:
        """The fields by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def select(self, lanes: slice) -> "History":
        """The history of some of the seeds."""
        picked = {name: x[lanes] for name, x in self.arrays().items() if name in SEED_AXIS}
        return replace(self, **picked)

    def extend(self, later: "History") -> "History":
        """Return this history followed by a later part of the same run."""
        joined = {
            name: x if name == "seeds" else np.concatenate([x, getattr(later, name)], axis=int(name in SEED_AXIS))
            for name, x in self.arrays().items()
        }
        return History(**joined)

    @staticmethod
    def join(parts: Sequence["History"]) -> "History":
        """Histories of different seeds over the same rounds, side by side."""
        joined = {name: np.concatenate([getattr(part, name) for part in parts]) for name in SEED_AXIS}
        return replace(parts[0], **joined)


SEED_AXIS = ("seeds", "before", "after", "held_out_before", "held_out_after")
