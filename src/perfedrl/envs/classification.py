"""Supervised agents, which differ in the classes they have examples of and in the labels of the classes."""

from typing import Any, NamedTuple

import equinox as eqx
import numpy as np
from jaxtyping import Float, Integer, Shaped

from perfedrl.envs.base import DataTask
from perfedrl.envs.fleet import Fleet, fleet
from perfedrl.envs.new_agents import Settings, drawn_agents, new_agent_seed
from perfedrl.errors import UserError
from perfedrl.memory import Need, check_host_memory
from perfedrl.types import Array

MOST = 100_000


class Examples(NamedTuple):
    """Inputs and their labels, along the same leading axis."""

    inputs: Float[Array, "n d"]
    labels: Shaped[Array, "n ..."]


class Classification(DataTask):
    """One agent's training and test examples.

    The policy is the classifier: an input is an observation, a label is the correct action, and the log-probability of
    the action is the log-likelihood of the label.
    """

    examples: Examples
    test: Examples
    actions: int = eqx.field(static=True)

    def __check_init__(self) -> None:
        for name, part in (("examples", self.examples), ("test", self.test)):
            if len(part.inputs) != len(part.labels) or not len(part.labels):
                raise UserError(f"{name}: expected as many labels as inputs, and at least one of each")
            if np.min(part.labels) < 0 or np.max(part.labels) >= self.actions:
                raise UserError(f"{name}: labels must be from 0 to {self.actions - 1}, for {self.actions} classes")

    @property
    def observation_size(self) -> int:
        return self.examples.inputs.shape[-1]


def classification(
    agents: int = 20,
    held_out: int = 10,
    classes: int = 10,
    classes_per_agent: int = 5,
    heterogeneity: float = 1.0,
    features: int = 16,
    informative: int = 4,
    noise: float = 0.3,
    distraction: float = 1.0,
    examples: int = 100,
    test_examples: int = 200,
    seed: int = 0,
) -> Fleet:
    """Gaussian classes around shared prototypes; each agent has some of the classes, under labels of its own.

    Prototypes are standard normal in `informative` directions, which a random rotation hides among the features.
    Examples deviate from them by Gaussian `noise`; the other directions are Gaussian with deviation `distraction` and
    carry no information. `heterogeneity` is the share of the labels that each agent permutes: at 0 all agents agree on
    the labels, at 1 an agent's labels say nothing about another's, so that a single shared classifier can only guess.
    """
    check_sizes(agents, classes, classes_per_agent, features, informative, examples, test_examples)
    if held_out < 0 or seed < 0:
        raise UserError(f"classification: held_out and seed must be >= 0; they are {held_out} and {seed}")
    if not 0 <= heterogeneity <= 1 or not 0 <= noise < float("inf") or not 0 <= distraction < float("inf"):
        raise UserError("classification: expected heterogeneity in [0, 1], and noise and distraction finite and >= 0")
    shape = agents + held_out, examples + test_examples, features
    check_host_memory(Need(8 * features * (features + shape[0] * shape[1]), shape))
    rng = np.random.default_rng(seed)
    prototypes = rng.normal(size=(classes, informative))
    rotation = np.linalg.qr(rng.normal(size=(features, features)))[0]
    world = prototypes, rotation, noise, distraction

    def agent(rng: np.random.Generator, share: float) -> Classification:
        own = rng.choice(classes, size=classes_per_agent, replace=False)
        names = renamed(rng, classes, share)
        learned, test = (drawn(rng, world, own, names, n) for n in (examples, test_examples))
        return Classification(learned, test, classes)

    def make(_: Any, settings: Settings) -> Classification:
        share = settings["heterogeneity"]
        if not 0 <= share <= 1:
            raise UserError(f"heterogeneity must lie in [0, 1]; it is {share}")
        return agent(np.random.default_rng([seed, new_agent_seed(settings)]), share)

    every = [agent(rng, heterogeneity) for _ in range(agents + held_out)]
    family = drawn_agents(make, [{"heterogeneity": heterogeneity}] * len(every))
    return fleet(every[:agents], every[agents:], family)


def renamed(rng: np.random.Generator, classes: int, heterogeneity: float) -> Integer[np.ndarray, " k"]:
    """Draw an agent's label of each class: a share of the labels is permuted."""
    names, changed = np.arange(classes), rng.permutation(classes)[: round(heterogeneity * classes)]
    names[changed] = rng.permutation(changed)
    return names


def drawn(rng: np.random.Generator, world: Any, own: np.ndarray, names: np.ndarray, n: int) -> Examples:
    """Draw n examples, uniformly from an agent's own classes."""
    prototypes, rotation, noise, distraction = world
    kinds = rng.choice(own, size=n)
    signal = prototypes[kinds] + noise * rng.normal(size=(n, prototypes.shape[1]))
    rest = distraction * rng.normal(size=(n, len(rotation) - prototypes.shape[1]))
    inputs = np.concatenate([signal, rest], axis=1) @ rotation.T
    return Examples(inputs.astype(np.float32), names[kinds].astype(np.int32))


def check_sizes(
    agents: int, classes: int, classes_per_agent: int, features: int, informative: int, examples: int, test: int
) -> None:
    """Check that the numbers of agents, classes, features and examples are in range."""
    named = {"agents": agents, "classes": classes, "features": features, "examples": examples, "test_examples": test}
    for name, count in named.items():
        least = 2 if name == "classes" else 1
        if not least <= count <= MOST:
            raise UserError(f"classification: {name} must be from {least} to {MOST}; it is {count}")
    for name, count, most in (
        ("classes_per_agent", classes_per_agent, classes),
        ("informative", informative, features),
    ):
        if not 1 <= count <= most:
            raise UserError(f"classification: {name} must be from 1 to {most}; it is {count}")
