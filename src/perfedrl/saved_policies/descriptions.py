"""Descriptions of policies as plain tables, one for each class: with the parameters they make its decisions in NumPy.

The fields of a description are what the parameters do not say. Parameters are arrays by name, as in a policy's file.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, ClassVar, Literal

import numpy as np
from jaxtyping import Float
from pydantic import Field, NonNegativeFloat, PositiveInt, model_validator

from perfedrl.errors import UserError
from perfedrl.saved_policies.decisions import (
    AppendedInputs,
    Decisions,
    Gaussian,
    NormalizedInputs,
    SeveralSoftmaxes,
    Softmax,
    feedback,
    gaussian_std,
    network,
    standard_deviation,
    table,
)
from perfedrl.saved_policies.spaces import FileTable, Finite

Widths = Annotated[tuple[PositiveInt, ...], Field(min_length=2)]


@dataclass(frozen=True)
class Parameters:
    """The parameters of a policy, or of a part of it: those whose names begin with `prefix`."""

    arrays: Mapping[str, np.ndarray]
    prefix: str = ""

    def part(self, name: str) -> "Parameters":
        """Return the parameters of a part."""
        return Parameters(self.arrays, f"{self.prefix}{name}.")

    def take(self, name: str, shape: tuple[int, ...]) -> Float[np.ndarray, "..."]:
        """Return an array of the part, which must have the given shape."""
        return self._checked(self.prefix + name, shape)

    def whole(self, shape: tuple[int, ...]) -> Float[np.ndarray, "..."]:
        """Return the parameters of a part that is a single array: by the name of the part, or "theta"."""
        return self._checked(self.prefix.removesuffix(".") or "theta", shape)

    def _checked(self, name: str, shape: tuple[int, ...]) -> Float[np.ndarray, "..."]:
        found = self.arrays.get(name)
        if found is None or found.shape != shape:
            has = "is missing" if found is None else f"has shape {list(found.shape)}"
            raise UserError(f"expected the array {name!r} of shape {list(shape)}; it {has}")
        return found

    def layers(self, widths: tuple[int, ...]) -> list[dict[str, np.ndarray]]:
        """Return the layers of a network."""
        sizes = enumerate(pairwise(widths))
        return [{"weight": self.take(f"{i}.weight", ij), "bias": self.take(f"{i}.bias", ij[1:])} for i, ij in sizes]


class States(FileTable):
    """A policy over finitely many states, which observations are the numbers of."""

    states: PositiveInt
    actions: PositiveInt

    @property
    def observation_size(self) -> None:
        """The length of an observation; None where it is the number of a state."""
        return None


class TableSoftmaxDescription(States):
    """A softmax with one parameter for each state and action."""

    name: Literal["TableSoftmax"] = Field(default="TableSoftmax", repr=False)

    def decisions(self, params: Parameters) -> Decisions:
        """Return the decisions of the policy with these parameters."""
        return Softmax(table(params.whole((self.states, self.actions))))


class LogLinearSoftmaxDescription(States):
    """A softmax over theta . phi(s, a), with features phi[S, A, d]."""

    name: Literal["LogLinearSoftmax"] = Field(default="LogLinearSoftmax", repr=False)
    features: tuple[tuple[tuple[Finite, ...], ...], ...] = Field(repr=False)

    @model_validator(mode="after")
    def _check_features(self) -> "LogLinearSoftmaxDescription":
        sizes = {len(phi) for row in self.features for phi in row}
        if len(self.features) != self.states or {len(row) for row in self.features} != {self.actions} or len(sizes) > 1:
            raise ValueError(f"features must have shape [{self.states}, {self.actions}, d]")
        return self

    def decisions(self, params: Parameters) -> Decisions:
        phi = np.asarray(self.features, np.float32)
        theta = params.whole(phi.shape[-1:])
        return Softmax(table(np.sum(phi.astype(theta.dtype) * theta, axis=-1)))


class Network(FileTable):
    """A policy whose outputs are those of a network."""

    widths: Widths
    activation: Literal["tanh"] = "tanh"

    states: ClassVar[None] = None
    """The number of states, where observations are their numbers."""

    @property
    def observation_size(self) -> int:
        """The length of an observation."""
        return self.widths[0]


class MLPSoftmaxDescription(Network):
    """A softmax over the outputs of a network."""

    name: Literal["MLPSoftmax"] = Field(default="MLPSoftmax", repr=False)

    def decisions(self, params: Parameters) -> Decisions:
        return Softmax(network(params.layers(self.widths)))


class MLPFactoredDescription(Network):
    """Independent softmaxes over the outputs of one network, for actions of several components."""

    name: Literal["MLPFactored"] = Field(default="MLPFactored", repr=False)
    actions: Annotated[tuple[PositiveInt, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _check_outputs(self) -> "MLPFactoredDescription":
        if sum(self.actions) != self.widths[-1]:
            raise ValueError(f"the network has {self.widths[-1]} outputs for components of {self.actions} choices")
        return self

    def decisions(self, params: Parameters) -> Decisions:
        return SeveralSoftmaxes(network(params.layers(self.widths)), self.actions)


class GaussianMLPDescription(Network):
    """Gaussian actions around the outputs of a network, with learned standard deviations."""

    name: Literal["GaussianMLP"] = Field(default="GaussianMLP", repr=False)
    least_std: NonNegativeFloat = Field(default=0.0, repr=False)

    def decisions(self, params: Parameters) -> Decisions:
        std = gaussian_std(params.take("log_std", self.widths[-1:]), self.least_std)
        return Gaussian(network(params.part("mean").layers(self.widths)), std)


class LinearGaussianDescription(FileTable):
    """Linear feedback -K x with Gaussian exploration, of a fixed or learned standard deviation."""

    name: Literal["LinearGaussian"] = Field(default="LinearGaussian", repr=False)
    shape: tuple[PositiveInt, PositiveInt]
    std: NonNegativeFloat
    learn_std: bool

    states: ClassVar[None] = None
    """The number of states, where observations are their numbers."""

    @property
    def observation_size(self) -> int:
        """The length of an observation."""
        return self.shape[1]

    def decisions(self, params: Parameters) -> Decisions:
        gain, size = params.take("gain", self.shape), self.shape[:1]
        std = np.exp(params.take("log_std", size)) if self.learn_std else np.full(size, self.std, np.float32)
        return Gaussian(feedback(gain), std if self.std else None)


class ActorCriticDescription(FileTable):
    """A policy with a value network, which its decisions do not depend on."""

    name: Literal["ActorCritic"] = Field(default="ActorCritic", repr=False)
    actor: "Description"

    @property
    def states(self) -> int | None:
        """The number of states, where observations are their numbers."""
        return self.actor.states

    @property
    def observation_size(self) -> int | None:
        """The length of an observation; None where it is the number of a state."""
        return self.actor.observation_size

    def decisions(self, params: Parameters) -> Decisions:
        return self.actor.decisions(params.part("actor"))


class ContextualDescription(FileTable):
    """A policy that sees a context after each observation; the model that adapts the context makes no decision."""

    name: Literal["Contextual"] = Field(default="Contextual", repr=False)
    context_size: PositiveInt
    policy: "Description"

    states: ClassVar[None] = None
    """The number of states, where observations are their numbers."""

    @model_validator(mode="after")
    def _check_size(self) -> "ContextualDescription":
        if self.policy.observation_size is None or self.policy.observation_size <= self.context_size:
            raise ValueError(
                f"expected a policy with more than {self.context_size} inputs, got {self.policy.observation_size}"
            )
        return self

    @property
    def observation_size(self) -> int:
        """The length of an observation, without the context."""
        return (self.policy.observation_size or 0) - self.context_size

    def decisions(self, params: Parameters) -> Decisions:
        inner = self.policy.decisions(params.part("policy"))
        return AppendedInputs(inner, params.part("context").whole((self.context_size,)))


class NormalizedDescription(FileTable):
    """A policy with normalized observations, of which the first `observations` components are, or rewards alone."""

    name: Literal["Normalized"] = Field(default="Normalized", repr=False)
    observations: PositiveInt | None
    policy: "Description"

    @model_validator(mode="after")
    def _check_size(self) -> "NormalizedDescription":
        size = self.policy.observation_size
        if self.observations is not None and (size is None or self.observations > size):
            raise ValueError(f"expected observations of at least {self.observations} numbers to normalize, got {size}")
        return self

    @property
    def states(self) -> int | None:
        """The number of states, where observations are their numbers."""
        return self.policy.states

    @property
    def observation_size(self) -> int | None:
        """The length of an observation; None where it is the number of a state."""
        return self.policy.observation_size

    def decisions(self, params: Parameters) -> Decisions:
        inner = self.policy.decisions(params.part("policy"))
        if self.observations is None:
            return inner
        moments, size = params.part("normalizer").part("observations"), (self.observations,)
        mean, square = moments.take("mean", size), moments.take("square", size)
        return NormalizedInputs(inner, mean, standard_deviation(mean, square, np))


class SightedDescription(FileTable):
    """A policy of one agent that sees, after the environment's observation, numbers of the agent's own task."""

    name: Literal["Sighted"] = Field(default="Sighted", repr=False)
    numbers: Annotated[tuple[Finite, ...], Field(min_length=1)]
    policy: "Description"

    states: ClassVar[None] = None
    """The number of states, where observations are their numbers."""

    @model_validator(mode="after")
    def _check_numbers(self) -> "SightedDescription":
        size = self.policy.observation_size
        if size is None or size <= len(self.numbers):
            raise ValueError(f"expected a policy of more than {len(self.numbers)} inputs, got {size}")
        return self

    @property
    def observation_size(self) -> int:
        """The length of an observation of the environment."""
        return (self.policy.observation_size or 0) - len(self.numbers)

    def decisions(self, params: Parameters) -> Decisions:
        return AppendedInputs(self.policy.decisions(params), np.asarray(self.numbers, np.float32))


Description = Annotated[
    TableSoftmaxDescription
    | LogLinearSoftmaxDescription
    | MLPSoftmaxDescription
    | MLPFactoredDescription
    | GaussianMLPDescription
    | LinearGaussianDescription
    | ActorCriticDescription
    | ContextualDescription
    | NormalizedDescription
    | SightedDescription,
    Field(discriminator="name"),
]
ActorCriticDescription.model_rebuild()
ContextualDescription.model_rebuild()
NormalizedDescription.model_rebuild()
SightedDescription.model_rebuild()
