"""Neural policies: a multilayer perceptron with tanh units under a softmax or a Gaussian."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, PRNGKeyArray

from perfedrl.envs import Fleet
from perfedrl.envs.inverse_transform import inverse_cdf, standard_normal
from perfedrl.errors import UserError
from perfedrl.policies.base import Decide, Policy
from perfedrl.policies.divergences import GaussianParameters, categorical, gaussian
from perfedrl.policies.regularity import softmax_of_network
from perfedrl.saved_policies import descriptions
from perfedrl.saved_policies.decisions import Gaussian, SeveralSoftmaxes, Softmax, gaussian_std, network
from perfedrl.types import Array, Noise, Params

LAST_SCALE = 0.1
"""Initial standard deviation of the last layer's weights: the first policy is nearly uniform over actions."""

WIDEST = 65_536


class MLPSoftmax(Policy):
    """A softmax over the outputs of an MLP; `widths` runs from the observation's size to the number of actions.

    (2, 32, 8) is the paper's network of 360 parameters (Appendix C.1).
    """

    widths: tuple[int, ...] = eqx.field(static=True, converter=tuple)

    noise = 1

    def __check_init__(self) -> None:
        check_widths(self.widths)

    @property
    def actions(self) -> int:
        return self.widths[-1]

    def init(self, key: PRNGKeyArray) -> Params:
        return init_layers(key, self.widths)

    def sample(self, params: Params, obs: Float[Array, " d"], u: Noise) -> Int[Array, ""]:
        return inverse_cdf(jax.nn.softmax(forward(params, obs)), u[0])

    def log_prob(self, params: Params, obs: Float[Array, " d"], action: Int[Array, ""]) -> Float[Array, ""]:
        logp = jax.nn.log_softmax(forward(params, obs))
        # A mask instead of a look-up: the gradient of a look-up is a scatter, slow and, on GPUs, nondeterministic.
        return jnp.sum(jnp.where(jnp.arange(self.widths[-1]) == action, logp, 0))

    def entropy(self, params: Params, obs: Float[Array, " d"]) -> Float[Array, ""]:
        """The entropy of the action distribution."""
        logp = jax.nn.log_softmax(forward(params, obs))
        return -jnp.sum(jnp.exp(logp) * logp)

    def distribution(self, params: Params, obs: Float[Array, " d"]) -> Float[Array, " A"]:
        return jax.nn.log_softmax(forward(params, obs))

    divergence = staticmethod(categorical)

    def in_numpy(self, params: Params) -> Decide:
        return Softmax(network(as_numpy(params))).draw

    @property
    def description(self) -> descriptions.MLPSoftmaxDescription:
        return descriptions.MLPSoftmaxDescription(widths=self.widths)

    def regularity_within(self, radius: float, observation: float) -> tuple[float, float, float]:
        """G, M and Lambda of Assumption 2 on |theta| <= radius, for observations of bounded norm."""
        return softmax_of_network(self.widths, radius, observation)


class MLPFactored(Policy):
    """Independent softmaxes over the outputs of one MLP, for actions of several discrete components.

    `actions` has the number of choices of each component; the network has one output for each choice.
    """

    widths: tuple[int, ...] = eqx.field(static=True, converter=tuple)
    actions: tuple[int, ...] = eqx.field(static=True, converter=tuple)

    def __check_init__(self) -> None:
        check_widths(self.widths)
        if not self.actions or min(self.actions) < 1 or sum(self.actions) != self.widths[-1]:
            raise UserError(f"the network has {self.widths[-1]} outputs for components of {self.actions} choices")

    @property
    def noise(self) -> int:
        return len(self.actions)

    def init(self, key: PRNGKeyArray) -> Params:
        return init_layers(key, self.widths)

    def sample(self, params: Params, obs: Float[Array, " d"], u: Noise) -> Int[Array, " k"]:
        parts = self._parts(forward(params, obs))
        return jnp.stack([inverse_cdf(jax.nn.softmax(part), u[i]) for i, part in enumerate(parts)])

    def log_prob(self, params: Params, obs: Float[Array, " d"], action: Int[Array, " k"]) -> Float[Array, ""]:
        logp = [jax.nn.log_softmax(part) for part in self._parts(forward(params, obs))]
        return sum((jnp.sum(jnp.where(jnp.arange(x.size) == a, x, 0)) for x, a in zip(logp, action)), jnp.zeros(()))  # noqa: B905

    def entropy(self, params: Params, obs: Float[Array, " d"]) -> Float[Array, ""]:
        """The entropy of the action distribution, the sum over components."""
        logp = [jax.nn.log_softmax(part) for part in self._parts(forward(params, obs))]
        return sum((-jnp.sum(jnp.exp(x) * x) for x in logp), jnp.zeros(()))

    def distribution(self, params: Params, obs: Float[Array, " d"]) -> tuple[Float[Array, " _"], ...]:
        return tuple(jax.nn.log_softmax(part) for part in self._parts(forward(params, obs)))

    def divergence(
        self, one: tuple[Float[Array, " _"], ...], other: tuple[Float[Array, " _"], ...]
    ) -> Float[Array, ""]:
        return sum((categorical(x, y) for x, y in zip(one, other, strict=True)), jnp.zeros(()))

    def in_numpy(self, params: Params) -> Decide:
        return SeveralSoftmaxes(network(as_numpy(params)), self.actions).draw

    @property
    def description(self) -> descriptions.MLPFactoredDescription:
        return descriptions.MLPFactoredDescription(widths=self.widths, actions=self.actions)

    def _parts(self, outputs: Float[Array, " k"]) -> Sequence[Float[Array, " a"]]:
        return jnp.split(outputs, np.cumsum(self.actions)[:-1])


class GaussianMLP(Policy):
    """Independent Gaussian actions around the outputs of an MLP, with learned standard deviations.

    `widths` runs from the observation's size to the number of action components; `last_scale` is the initial standard
    deviation of the last layer's weights. The variance of an action is `least_std` ** 2 + exp(log_std) ** 2, so that
    exploration never ends.
    """

    widths: tuple[int, ...] = eqx.field(static=True, converter=tuple)
    initial_std: float = eqx.field(static=True, default=1.0)
    last_scale: float = eqx.field(static=True, default=LAST_SCALE)
    least_std: float = eqx.field(static=True, default=0.0)

    def __check_init__(self) -> None:
        check_widths(self.widths)
        if not 0 <= self.last_scale < float("inf"):
            raise UserError(f"last_scale must be a finite number >= 0; it is {self.last_scale}")
        if not 0 < self.initial_std < float("inf"):
            raise UserError(f"initial_std must be a finite number > 0; it is {self.initial_std}")
        if not 0 <= self.least_std < self.initial_std:
            raise UserError(f"least_std must lie in [0, initial_std), below {self.initial_std}; it is {self.least_std}")

    @property
    def action_size(self) -> int:
        return self.widths[-1]

    @property
    def noise(self) -> int:
        return self.widths[-1]

    def init(self, key: PRNGKeyArray) -> Params:
        learned = np.sqrt(self.initial_std**2 - self.least_std**2) if self.least_std else self.initial_std
        log_std = jnp.full(self.widths[-1], jnp.log(learned))
        return {"mean": init_layers(key, self.widths, self.last_scale), "log_std": log_std}

    def sample(self, params: Params, obs: Float[Array, " d"], u: Noise) -> Float[Array, " a"]:
        return forward(params["mean"], obs) + jnp.exp(self.log_std(params)) * standard_normal(u)

    def log_std(self, params: Params) -> Float[Array, " a"]:
        """Return the logarithms of the standard deviations of an action."""
        if not self.least_std:
            return params["log_std"]
        return 0.5 * jnp.logaddexp(2 * params["log_std"], 2 * np.log(self.least_std))

    def log_prob(self, params: Params, obs: Float[Array, " d"], action: Float[Array, " a"]) -> Float[Array, ""]:
        log_std = self.log_std(params)
        z = (action - forward(params["mean"], obs)) * jnp.exp(-log_std)
        return -jnp.sum(0.5 * z**2 + log_std + 0.5 * np.log(2 * np.pi))

    def entropy(self, params: Params, obs: Float[Array, " d"]) -> Float[Array, ""]:
        """The entropy of the Gaussian, the same at every observation."""
        return jnp.sum(self.log_std(params) + 0.5 * np.log(2 * np.pi * np.e))

    def distribution(self, params: Params, obs: Float[Array, " d"]) -> GaussianParameters:
        return forward(params["mean"], obs), jnp.exp(self.log_std(params))

    divergence = staticmethod(gaussian)

    def variance(self, params: Params) -> Float[Array, ""]:
        return jnp.mean(jnp.exp(2 * self.log_std(params)))

    def in_numpy(self, params: Params) -> Decide:
        return Gaussian(
            network(as_numpy(params["mean"])), gaussian_std(np.asarray(params["log_std"]), self.least_std)
        ).draw

    @property
    def description(self) -> descriptions.GaussianMLPDescription:
        return descriptions.GaussianMLPDescription(widths=self.widths, least_std=self.least_std)


def forward(layers: Params, x: Float[Array, " d"]) -> Float[Array, " k"]:
    """Return the outputs of a network with tanh between layers and none after the last."""
    if np.shape(x) != layers[0]["weight"].shape[:1]:  # a product would broadcast
        raise ValueError(f"the network takes vectors of length {len(layers[0]['weight'])}, not of shape {np.shape(x)}")
    for i, layer in enumerate(layers):
        x = times(jnp.tanh(x) if i else x, layer["weight"]) + layer["bias"]
    return x


def times(x: Float[Array, " d"], weight: Float[Array, "d k"]) -> Float[Array, " k"]:
    """Multiply a vector and a matrix, in the way that is fast and reproducible on the backend.

    On CPUs a product and a sum take three times longer than a matrix product. On GPUs they are as fast, while a matrix
    product would round to ten bits and choose its kernel, and so its last bits, by the number of parallel seeds.
    """
    return x @ weight if jax.default_backend() == "cpu" else jnp.sum(x[:, None] * weight, axis=0)


def init_layers(key: PRNGKeyArray, widths: Sequence[int], last_scale: float = LAST_SCALE) -> Params:
    """Draw normal weights of variance 1 / (2 inputs), and `last_scale` ** 2 in the last layer; biases are zero."""
    layers = []
    for i, (inputs, outputs, k) in enumerate(
        zip(widths[:-1], widths[1:], jax.random.split(key, len(widths) - 1), strict=True)
    ):
        scale = last_scale if i == len(widths) - 2 else np.sqrt(0.5 / inputs)
        layers.append({"weight": scale * jax.random.normal(k, (inputs, outputs)), "bias": jnp.zeros(outputs)})
    return tuple(layers)


def check_widths(widths: Sequence[int]) -> None:
    """Check that a network has at least two widths in range."""
    if len(widths) < 2 or any(not 1 <= width <= WIDEST for width in widths):
        raise UserError(f"an MLP needs at least two widths, each from 1 to {WIDEST}; they are {list(widths)}")


def as_numpy(params: Params) -> Any:
    """Return parameters as NumPy arrays."""
    return jax.tree.map(np.asarray, params)


def mlp(fleet: Fleet, hidden: Sequence[int] = (32,)) -> MLPSoftmax | MLPFactored:
    """A softmax MLP with tanh units, for vectors as observations and finitely many actions.

    An action of several components has a softmax for each.
    """
    actions = fleet.train.actions
    if not isinstance(actions, int | tuple):
        raise UserError("the policy 'mlp' needs agents with finitely many actions; for others there is 'gaussian-mlp'")
    size = observation_size(fleet, "mlp")
    if isinstance(actions, tuple):
        return MLPFactored((size, *hidden, sum(actions)), actions)
    return MLPSoftmax((size, *hidden, actions))


def gaussian_mlp(
    fleet: Fleet,
    hidden: Sequence[int] = (32,),
    initial_std: float = 1.0,
    last_scale: float = LAST_SCALE,
    least_std: float = 0.0,
) -> GaussianMLP:
    """A Gaussian around a tanh MLP, for actions that are vectors; with `last_scale = 0` the initial mean is 0.

    The standard deviation is learned, from `initial_std`, and stays above `least_std`.
    """
    size = fleet.train.action_size
    if not isinstance(size, int):
        raise UserError("the policy 'gaussian-mlp' needs agents whose actions are vectors; for others there is 'mlp'")
    return GaussianMLP((observation_size(fleet, "gaussian-mlp"), *hidden, size), initial_std, last_scale, least_std)


def observation_size(fleet: Fleet, name: str) -> int:
    """Return the length of an agent's observation, for the policy `name`."""
    task: Any = fleet.task(0)
    if task.observation_size is not None:
        return task.observation_size
    obs = jax.eval_shape(lambda u: task.observe(task.reset(u)), jax.ShapeDtypeStruct((task.reset_noise,), np.float32))
    if not isinstance(obs, jax.ShapeDtypeStruct) or obs.ndim != 1 or not np.issubdtype(obs.dtype, np.floating):
        raise UserError(
            f"the policy {name!r} needs observations that are vectors of numbers; for a finite MDP: 'table'"
        )
    return obs.shape[0]
