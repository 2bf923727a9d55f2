"""What a diagnosis measures of a fleet: returns of shared, own and foreign policies, and what learning them takes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

from perfedrl.errors import UserError
from perfedrl.experiments.files import npz, read_npz, write_atomically

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class FleetReturns:
    """Returns of a fleet's agents under several policies. Exact numbers have a single row of seeds.

    - `untrained`, `shared`, `own`: under the policy that training starts from, under one policy for all, and under the
      best policy that was found for the agent itself.
    - `transfer`: under the policy of agent i (second axis) on agent j (third axis).
    - `adapted`: one gradient step after an initialization that was trained for it, from each of `budgets` trajectories.
    - `tuned`: several steps after one policy for all, which share as many trajectories. If `exact`, both are of agents
      that the training left out.
    - `alone`: of an agent that learns from scratch, after each of `spent` trajectories of its own.
    """

    untrained: Float[np.ndarray, "seed agent"]
    shared: Float[np.ndarray, "row agent"]
    own: Float[np.ndarray, "row agent"]
    transfer: Float[np.ndarray, "row agent agent"]
    budgets: Int[np.ndarray, " budget"]
    adapted: Float[np.ndarray, "seed budget agent"]
    tuned: Float[np.ndarray, "seed budget agent"]
    spent: Int[np.ndarray, " evaluation"]
    alone: Float[np.ndarray, "seed evaluation agent"]
    exact: bool
    """Whether `shared`, `own` and `transfer` were computed and not trained."""

    @property
    def agents(self) -> int:
        """The number of agents."""
        return self.own.shape[-1]


@dataclass(frozen=True)
class SavedParts:
    """Parts of a diagnosis in a folder, one file each, so that an interrupted one goes on; None saves nothing."""

    folder: Path | None
    restart: bool = False

    def check_same(self, digest: str) -> None:
        """Check that the folder's parts are of what has this digest; a new folder is marked with it."""
        if self.folder is None:
            return
        path = self.folder / "digest"
        if not self.restart and path.is_file() and path.read_bytes() != digest.encode():
            raise UserError(
                f"{self.folder} has parts of another fleet or of other settings; take another, or --restart"
            )
        write_atomically(path, digest.encode())

    def get(self, name: str, make: Callable[[], Mapping[str, np.ndarray]]) -> Arrays:
        """Read a part, or make and save it."""
        if self.folder is None:
            return dict(make())
        path = self.folder / f"{name}.npz"
        if self.restart or not path.is_file():
            write_atomically(path, npz(dict(make())))
        return read_npz(path, dict)
