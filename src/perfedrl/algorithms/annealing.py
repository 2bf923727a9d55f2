"""The rate of an optimizer, an agent's or the server's, over rounds: constant, or falling to a small share."""

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
from jaxtyping import PyTree

from perfedrl.algorithms.checks import check_choice, check_counts
from perfedrl.errors import UserError
from perfedrl.types import Scalar

SCHEDULES = ("linear", "cosine")
LAST_SHARE = 0.05
"""The share of the rate that is left at the end of annealing."""


@dataclass(frozen=True)
class Annealing:
    """A fall of the rate over some rounds, linear or along half a cosine; None rounds leave it constant.

    Who takes the steps keeps the number of the round, which is () where the rate is constant: agents have it in their
    messages, a server in its private state.
    """

    rounds: int | None = None
    schedule: Literal["linear", "cosine"] = "linear"

    def __post_init__(self) -> None:
        check_choice("schedule", self.schedule, SCHEDULES)
        if self.rounds is not None:
            check_counts(anneal=self.rounds)
        elif self.schedule != SCHEDULES[0]:
            raise UserError(
                f"schedule = {self.schedule!r} needs anneal, the number of rounds over which the rate falls"
            )

    @property
    def first_round(self) -> PyTree:
        """The number of the first round."""
        return () if self.rounds is None else jnp.zeros(())

    def next_round(self, number: PyTree) -> PyTree:
        """Return the number of the round after this one."""
        return () if self.rounds is None else number + 1

    def rate(self, beta: Scalar, number: PyTree) -> Scalar:
        """Return the rate in a round: beta, or between beta and a small share of it."""
        if self.rounds is None:
            return beta
        gone = jnp.minimum(number / self.rounds, 1.0)
        if self.schedule == "cosine":
            gone = (1 - jnp.cos(jnp.pi * gone)) / 2
        return beta * (1 - (1 - LAST_SHARE) * gone)
