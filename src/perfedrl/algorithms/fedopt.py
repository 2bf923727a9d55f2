"""FedOpt (Reddi et al., 2021): a server optimizer that takes a round's mean displacement for a gradient."""

from typing import Any, Literal, NamedTuple

import jax
import optax
from jaxtyping import Float, PyTree

from perfedrl.algorithms.annealing import Annealing
from perfedrl.algorithms.base import ServerState, static
from perfedrl.algorithms.checks import check_choice, check_positive
from perfedrl.algorithms.wrapper import Wrapper, check_federated, check_only_parameters
from perfedrl.envs import Fleet
from perfedrl.errors import UserError
from perfedrl.types import Array, Params

OPTIMIZERS = ("sgd", "momentum", "adam", "yogi", "adagrad")


class OptimizerState(NamedTuple):
    """The server's private state: the inner algorithm's, the optimizer's moments, and the number of the round."""

    inner: PyTree
    moments: PyTree
    round: PyTree = ()
    """The number of the round, where the rate falls over rounds."""


class FedOpt(Wrapper):
    """Step by `rate` times an optimizer's direction on the server, instead of all the way to the mean.

    The pseudo-gradient is the displacement that the inner server would make. "sgd" is a plain step, at rate 1 the inner
    algorithm; "momentum" adds heavy-ball momentum; "adam", "yogi" and "adagrad" scale coordinates, with `eps` as their
    degree of adaptivity. With `anneal` the rate falls to a twentieth over so many rounds, along a `schedule`. The
    optimizer's state never leaves the server, and the agents' work is unchanged.
    """

    optimizer: Literal["sgd", "momentum", "adam", "yogi", "adagrad"] = static("adam")
    rate: float = 0.01
    momentum: float = static(0.9)
    b1: float = static(0.9)
    b2: float = static(0.99)
    eps: float = static(1e-3)
    anneal: int | None = static(None)
    schedule: Literal["linear", "cosine"] = static("linear")

    def __check_init__(self) -> None:
        check_federated(self.inner, "displacement to step along")
        check_choice("server's optimizer", self.optimizer, OPTIMIZERS)
        check_positive(rate=self.rate, eps=self.eps)
        for name, value in {"momentum": self.momentum, "b1": self.b1, "b2": self.b2}.items():
            if not 0 <= value < 1:
                raise UserError(f"the server's {name} must lie in [0, 1); it is {value}")
        self.annealing  # noqa: B018 - making it checks its settings

    @property
    def annealing(self) -> Annealing:
        """The rate over rounds."""
        return Annealing(self.anneal, self.schedule)

    def check_supports(self, fleet: Fleet, policy: Any) -> None:
        """Require messages that hold nothing but parameters, beside the inner algorithm's own requirements."""
        check_only_parameters(self.inner, fleet, policy, "a server's optimizer moves")

    def init(self, params: Params) -> tuple[ServerState, PyTree]:
        server, client = self.inner.init(params)
        moments = self._direction.init(server.message)
        return ServerState(server.message, OptimizerState(server.private, moments, self.annealing.first_round)), client

    def server(self, state: ServerState, uploads: PyTree, weights: Float[Array, " n"]) -> ServerState:
        inner, moments, number = state.private
        rate = self.annealing.rate(self.rate, number)
        after = self.inner.server(ServerState(state.message, inner), uploads, weights)
        moved = optax.tree.sub(after.message, state.message)
        direction, moments = self._direction.update(moved, moments)

        def step(new: Array, d: Array, m: Array) -> Array:
            # Added to the inner server's result, so that rate 1 is bitwise the inner algorithm.
            return new + (rate * d - m)

        message = jax.tree.map(step, after.message, direction, moved)
        return ServerState(message, OptimizerState(after.private, moments, self.annealing.next_round(number)))

    @property
    def _direction(self) -> optax.GradientTransformation:
        if self.optimizer == "sgd":
            return optax.identity()
        if self.optimizer == "momentum":
            return optax.trace(self.momentum)
        if self.optimizer == "adagrad":
            return optax.scale_by_rss(0.0, self.eps**2)
        if self.optimizer == "adam":
            return optax.scale_by_adam(self.b1, self.b2, self.eps)
        # From 0: a positive start would move coordinates whose displacement is always 0.
        return optax.scale_by_yogi(self.b1, self.b2, self.eps, initial_accumulator_value=0.0)
