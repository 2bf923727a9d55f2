"""Decisions of a whole batch in NumPy, for environments that are stepped in Python.

There a decision takes ten microseconds, and a compiled call would spend several times that on being called. A policy
offers it as `in_numpy(params)`; where it does not, its `sample` is compiled. Both decide alike, up to rounding.
"""

from collections.abc import Callable

import jax
import numpy as np
from jaxtyping import Float, Int
from scipy.special import ndtri

from perfedrl.types import Params

Decide = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Observations [n, d] and uniforms [n, k] -> actions [n, ...]."""

EDGE = np.finfo(np.float32).eps / 2


def network(layers: Params) -> Callable[[Float[np.ndarray, "n d"]], Float[np.ndarray, "n k"]]:
    """A network's outputs for a batch of inputs."""
    plain = jax.tree.map(np.asarray, layers)

    def outputs(x: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n k"]:
        for i, layer in enumerate(plain):
            x = (np.tanh(x) if i else x) @ layer["weight"] + layer["bias"]
        return x

    return outputs


def choice(logits: Float[np.ndarray, "n k"], u: Float[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
    """A draw from each row's softmax by inverse transform."""
    cdf = np.cumsum(np.exp(logits - logits.max(axis=1, keepdims=True)), axis=1)
    return ((u * cdf[:, -1])[:, None] >= cdf[:, :-1]).sum(axis=1, dtype=np.int32)


def normal(u: Float[np.ndarray, "n k"]) -> Float[np.ndarray, "n k"]:
    """Standard normal draws by inverse transform."""
    return ndtri(np.clip(u, EDGE, 1 - EDGE))
