"""Personal parameters: a part of the message that every agent keeps to itself."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Float, PRNGKeyArray, PyTree

from perfedrl.algorithms.base import Algorithm, ServerState
from perfedrl.algorithms.wrapper import Wrapper, check_displacement, check_federated
from perfedrl.errors import UserError
from perfedrl.estimators import Objective
from perfedrl.types import Array, Params


class PersonalState(NamedTuple):
    """A client's state: the inner algorithm's, and the agent's personal parameters by their paths in a message."""

    inner: PyTree
    kept: dict[str, Array]


class Personal(Wrapper):
    """Keep a part of the parameters with the agents: those whose path contains one of the `names`.

    A name is a key, "normalizer", or several in a row, "normalizer.rewards". An agent keeps its own values of these
    parameters in its state and works with them; in its upload they are empty arrays. The server's message keeps the
    start values, from which a new agent starts in any round. A learned step size of a personal parameter is personal
    too.

    Goes directly around an algorithm whose upload is a changed message, so that privacy, aggregation and attacks clip,
    noise and compare only what is sent.
    """

    names: tuple[str, ...] = eqx.field(static=True)

    runs_on_agents = True

    def __init__(self, inner: Algorithm, names: tuple[str, ...]):
        check_federated(inner, "part of an upload to keep back")
        if isinstance(inner, Wrapper):
            raise UserError(f"personal parameters go inside {type(inner).__name__}, not around it")
        if isinstance(names, str) or not names or not all(isinstance(name, str) and name for name in names):
            raise UserError(f"personal parameters go by names, such as ('normalizer',); they are {names!r}")
        self.inner, self.names = inner, tuple(names)

    def diagnostics(self, state: PersonalState) -> Mapping[str, Array]:
        return self.inner.diagnostics(state.inner)

    def init(self, params: Params) -> tuple[ServerState, PersonalState]:
        server, client = self.inner.init(params)
        kept, count = self._own(server.message), len(jax.tree.leaves(server.message))
        if not 0 < len(kept) < count:
            which = "every" if kept else "no"
            raise UserError(f"{which} parameter is called {' or '.join(self.names)}; some must be, and some not")
        return server, PersonalState(client, kept)

    def client(
        self, message: PyTree, state: PersonalState, agent: Objective, key: PRNGKeyArray
    ) -> tuple[PyTree, PersonalState]:
        upload, inner = self.inner.client(self.with_personal_part(message, state), state.inner, agent, key)
        check_displacement(message, upload, "personal parameters are")
        return self.unchanged_upload(upload), PersonalState(inner, self._own(upload))

    def server(self, state: ServerState, uploads: PyTree, weights: Float[Array, " n"]) -> ServerState:
        start = self._own(state.message)
        everybodys = {path: jnp.broadcast_to(x, (len(weights), *jnp.shape(x))) for path, x in start.items()}
        after = self.inner.server(state, self._put(uploads, everybodys), weights)
        # Restored, since the mean of equal numbers may round.
        return after._replace(message=self._put(after.message, start))

    def personalize(self, message: PyTree, state: PersonalState, agent: Objective, key: PRNGKeyArray, m: int) -> Params:
        return self.inner.personalize(self.with_personal_part(message, state), state.inner, agent, key, m)

    def starting_point(
        self, message: PyTree, state: PersonalState, agent: Objective, key: PRNGKeyArray, m: int
    ) -> Params:
        return self.inner.starting_point(self.with_personal_part(message, state), state.inner, agent, key, m)

    def with_personal_part(self, message: PyTree, state: PersonalState) -> PyTree:
        return self._put(message, state.kept)

    @property
    def uploads_whole_messages(self) -> bool:
        return False

    def unchanged_upload(self, message: PyTree) -> PyTree:
        """Return the message with empty arrays in place of the personal parameters."""
        nothing = {path: jnp.zeros(0, jnp.result_type(x)) for path, x in self._own(message).items()}
        return self._put(message, nothing)

    def _own(self, tree: PyTree) -> dict[str, Array]:
        paths = ((path_name(path), x) for path, x in jax.tree_util.tree_leaves_with_path(tree))
        return {path: x for path, x in paths if any(f".{name}." in f".{path}." for name in self.names)}

    def _put(self, tree: PyTree, values: Mapping[str, Array]) -> PyTree:
        return jax.tree_util.tree_map_with_path(lambda path, x: values.get(path_name(path), x), tree)


def path_name(path: Any) -> str:
    """The path of a leaf as text, such as "normalizer.rewards.square"."""
    return jax.tree_util.keystr(path, simple=True, separator=".")
