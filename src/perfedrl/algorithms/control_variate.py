"""Control variates for client sampling and client drift: SCAFFOLD (Karimireddy et al., 2020) around an algorithm."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Float, PRNGKeyArray, PyTree

from perfedrl.algorithms.base import Algorithm, ServerState, average, local_steps
from perfedrl.algorithms.checks import check_choice, check_positive
from perfedrl.algorithms.fedavg_pg import FedAvgPG
from perfedrl.algorithms.fedopt import FedOpt
from perfedrl.algorithms.per_fedavg_pg import PerFedAvgPG
from perfedrl.algorithms.personal import Personal
from perfedrl.algorithms.wrapper import Wrapper, check_displacement, check_federated, check_only_parameters, unwrapped
from perfedrl.envs import Fleet
from perfedrl.errors import UserError
from perfedrl.estimators import Objective, StepKeys
from perfedrl.types import Array, Params

MODES = ("round", "step")
STEPPED = (FedAvgPG, PerFedAvgPG)
"""Algorithms whose local steps can be corrected one by one: the carry of a step is the message and the state."""
MEMORY = 0.1


class WithControl(NamedTuple):
    """The inner algorithm's part (a client's state, the server's private part, a message), and a control variate."""

    inner: PyTree
    control: PyTree


class ControlVariate(Wrapper):
    """Correct the uploads of sampled agents by the remembered displacements of all agents.

    `mode = "round"` corrects the sampling of agents. Agent i remembers its displacements as c_i and uploads the
    difference of its new displacement from c_i; the server, which holds c = mean of all c_i, adds c. Nothing more is
    sent in either direction, and with full participation it is the inner algorithm at any number of local steps.

    `mode = "step"` is SCAFFOLD, which corrects drift too: c is broadcast, and c - c_i is added to every local step.
    Here c_i is the mean step of agent i, beta times the paper's c_i: so beta is not needed, and values learned at
    another rate are corrected at that rate. The server computes the mean change of c_i from the uploads.

    `memory` is the weight of the newest displacement in c_i: 1 remembers the last round alone, as published, with all
    its noise; less averages over about 1 / memory rounds. `total` is the sum of all training agents' weights: their
    number, if they are equal. For a server step size put `FedOpt` inside.
    """

    memory: Any
    mode: str = eqx.field(static=True)
    total: float = eqx.field(static=True)

    runs_on_agents = True
    remembers_uploads = True

    def __init__(self, inner: Algorithm, mode: Literal["round", "step"], total: float, memory: float = MEMORY):
        check_federated(inner, "upload to correct")
        check_choice("mode of a control variate", mode, MODES)
        check_positive(total=total, memory=memory)
        if isinstance(memory, int | float) and memory > 1:
            raise UserError(f"the memory of a control variate is at most 1, the last round alone; it is {memory:g}")
        agents = inner.inner if isinstance(inner, FedOpt) else inner
        if isinstance(agents, Wrapper) and not isinstance(agents, Personal):
            raise UserError(f"a control variate goes inside {type(agents).__name__}, not around it")
        if mode == "step" and not stepped(agents):
            raise UserError(
                f"{type(agents).__name__} has no plain local steps that could be corrected one by one: choose "
                "mode = 'round', which corrects its uploads"
            )
        self.inner, self.mode, self.total, self.memory = inner, mode, float(total), memory

    def diagnostics(self, state: WithControl) -> Mapping[str, Array]:
        return self.inner.diagnostics(state.inner)

    def adaptation_step_size(self, message: PyTree) -> Any:
        return self.inner.adaptation_step_size(self._plain(message))

    def deployment_step_size(self, message: PyTree) -> Any:
        return self.inner.deployment_step_size(self._plain(message))

    def with_personal_part(self, message: PyTree, state: WithControl) -> PyTree:
        seen = self.inner.with_personal_part(self._plain(message), state.inner)
        return message._replace(inner=seen) if self.mode == "step" else seen

    def check_supports(self, fleet: Fleet, policy: Any) -> None:
        """Require messages that hold nothing but parameters, beside the inner algorithm's own requirements."""
        check_only_parameters(self.inner, fleet, policy, "a control variate corrects")

    def check_participation(self, agents: int, participants: int, weights: Sequence[float] | None) -> None:
        """Check that the fleet's weights add up to `total`."""
        total = float(agents if weights is None else sum(weights))
        if abs(total - self.total) > 1e-6 * total:
            raise UserError(f"the agents' weights add up to {total:g}; the control variate was made for {self.total:g}")
        super().check_participation(agents, participants, weights)

    def init(self, params: Params) -> tuple[ServerState, WithControl]:
        server, client = self.inner.init(params)
        nothing = jax.tree.map(jnp.zeros_like, self.inner.unchanged_upload(server.message))
        if self.mode == "round":
            return ServerState(server.message, WithControl(server.private, nothing)), WithControl(client, nothing)
        return ServerState(WithControl(server.message, nothing), server.private), WithControl(client, nothing)

    def client(
        self, message: PyTree, state: WithControl, agent: Objective, key: PRNGKeyArray
    ) -> tuple[PyTree, WithControl]:
        return (self._round if self.mode == "round" else self._steps)(message, state, agent, key)

    def _round(
        self, message: PyTree, state: WithControl, agent: Objective, key: PRNGKeyArray
    ) -> tuple[PyTree, WithControl]:
        """Return the inner upload less the remembered displacement."""
        upload, inner = self.inner.client(message, state.inner, agent, key)
        sent = self.inner.unchanged_upload(message)
        check_displacement(sent, upload, "control variates are")
        return optax.tree.sub(upload, state.control), WithControl(
            inner, self._remembered(state.control, optax.tree.sub(upload, sent))
        )

    def _steps(
        self, message: WithControl, state: WithControl, agent: Objective, key: PRNGKeyArray
    ) -> tuple[PyTree, WithControl]:
        """Take local steps, each corrected by c - c_i; remember their mean without the correction."""
        correction = optax.tree.sub(message.control, state.control)

        def step(carry: tuple[PyTree, PyTree], keys: StepKeys) -> tuple[PyTree, PyTree]:
            theta, inner = self._stepping.step(agent, carry, keys)
            return optax.tree.add(theta, correction), inner

        count = self._stepping.local_steps
        upload, inner = local_steps(step, (message.inner, state.inner), agent, key, count)
        mean = optax.tree.scale(1 / count, optax.tree.sub(upload, message.inner))
        return upload, WithControl(inner, self._remembered(state.control, optax.tree.sub(mean, correction)))

    def _remembered(self, control: PyTree, seen: PyTree) -> PyTree:
        return optax.tree.add_scale(control, self.memory, optax.tree.sub(seen, control))

    def server(self, state: ServerState, uploads: PyTree, weights: Float[Array, " n"]) -> ServerState:
        plain, learned = self._plain(state.message), self.memory * jnp.sum(weights) / self.total
        said = average(optax.tree.sub(uploads, self.inner.unchanged_upload(plain)), weights)
        if self.mode == "round":
            inner, control = state.private
            after = self.inner.server(ServerState(plain, inner), optax.tree.add(uploads, control), weights)
            return after._replace(private=WithControl(after.private, optax.tree.add_scale(control, learned, said)))
        after = self.inner.server(ServerState(plain, state.private), uploads, weights)
        control = state.message.control
        change = optax.tree.sub(optax.tree.scale(1 / self._stepping.local_steps, said), control)
        return after._replace(message=WithControl(after.message, optax.tree.add_scale(control, learned, change)))

    def shared(self, message: PyTree) -> Params:
        return self.inner.shared(self._plain(message))

    def personalize(self, message: PyTree, state: WithControl, agent: Objective, key: PRNGKeyArray, m: int) -> Params:
        return self.inner.personalize(self._plain(message), state.inner, agent, key, m)

    def starting_point(
        self, message: PyTree, state: WithControl, agent: Objective, key: PRNGKeyArray, m: int
    ) -> Params:
        return self.inner.starting_point(self._plain(message), state.inner, agent, key, m)

    @property
    def uploads_whole_messages(self) -> bool:
        return self.mode == "round" and self.inner.uploads_whole_messages

    def unchanged_upload(self, message: PyTree) -> PyTree:
        return self.inner.unchanged_upload(self._plain(message))

    @property
    def _stepping(self) -> FedAvgPG | PerFedAvgPG:
        """The algorithm whose local steps are corrected one by one."""
        algorithm = unwrapped(self.inner)
        assert isinstance(algorithm, STEPPED)
        return algorithm

    def _plain(self, message: PyTree) -> PyTree:
        """Return the inner algorithm's message."""
        return message.inner if self.mode == "step" else message


def stepped(algorithm: Any) -> bool:
    """Whether an algorithm's client consists of `local_steps` calls of its `step`."""
    if isinstance(algorithm, PerFedAvgPG) and algorithm.local_optimizer is not None:
        return False
    return any(isinstance(algorithm, kind) and type(algorithm).client is kind.client for kind in STEPPED)
