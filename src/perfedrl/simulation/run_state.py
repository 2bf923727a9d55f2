"""The state of a run: the fleet between two rounds, and the run with its measurements so far."""

from typing import NamedTuple

from jaxtyping import PyTree

from perfedrl.algorithms import ServerState
from perfedrl.simulation.failures import Counts
from perfedrl.simulation.history import History


class FleetState(NamedTuple):
    """Everything that training carries from round to round; `clients` has a leading agent axis."""

    server: ServerState
    clients: PyTree


class RunState(NamedTuple):
    """A run after some rounds: all that is needed to continue it, and all that was measured so far.

    Arrays have a leading axis of seeds. `fleet_state` is None where the agents' states are not at hand, as on the
    server of a networked fleet; `history` is None before the first measurement.
    """

    round: int
    fleet_state: FleetState | None
    history: History | None
    name: str = ""
    rounds: int = 0
    """The number of rounds after which the run ends."""
    group: str = ""
    """A label that runs share which train in one compiled call."""
    failures: Counts | None = None
    """How often agents that are played in Python failed so far."""
    best: FleetState | None = None
    """Each seed's state at its best evaluation so far; None where a run keeps the last state only."""

    @property
    def measured(self) -> bool:
        """Whether the run was measured after its last round."""
        return self.history is not None and int(self.history.rounds[-1]) == self.round
