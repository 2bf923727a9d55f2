"""Local differential privacy: uploads are clipped and noised at the agent; `perfedrl.privacy` does the accounting.

This is the simulation, with floating-point noise from training's keys; agents in a network add exact noise
(`federation/agent/private_release.py`).
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PRNGKeyArray, PyTree

from perfedrl.algorithms.base import Algorithm
from perfedrl.algorithms.checks import LARGEST_STEP
from perfedrl.algorithms.wrapper import Wrapper, check_displacement, check_federated
from perfedrl.errors import UserError
from perfedrl.estimators import Objective
from perfedrl.key_domains import UPLOAD_NOISE
from perfedrl.types import Scalar


class Private(Wrapper):
    """Clip and noise the uploads of an algorithm: a local Gaussian mechanism of each agent.

    The inner client uses the same key as without privacy, so its draws are the same. In a simulation the noise comes
    from that key too, which measures the cost of privacy but protects nobody; an agent in a network adds noise of its
    own instead.
    """

    clip: Any
    noise: Any

    def __init__(self, inner: Algorithm, clip: float, noise: float):
        check_federated(inner, "upload to protect")
        check_privacy(clip, noise)
        self.inner, self.clip, self.noise = inner, clip, noise

    def client(self, message: PyTree, state: PyTree, agent: Objective, key: PRNGKeyArray) -> tuple[PyTree, PyTree]:
        upload, state = self.inner.client(message, state, agent, key)
        sent = self.inner.unchanged_upload(message)
        return privatize(sent, upload, self.clip, self.noise, jax.random.fold_in(key, UPLOAD_NOISE)), state


def privatize(message: PyTree, upload: PyTree, clip: Scalar, noise: Scalar, key: PRNGKeyArray) -> PyTree:
    """Clip the displacement of an upload from the message to the length `clip`, and add noise to every coordinate.

    Upload and message are whole vectors, and the noise is Gaussian with standard deviation `noise` times `clip`. It
    protects nobody, even with a secret key: the last bits of a floating-point sum tell which numbers were added. An
    upload that is not finite is replaced by the message.
    """
    check_displacement(message, upload, "privacy is")
    length = optax.tree.norm(optax.tree.sub(upload, message))
    short, long = length <= clip, jnp.isfinite(length) & (length > clip)
    share = jnp.where(long, clip / jnp.where(long, length, 1), 0)
    leaves, structure = jax.tree.flatten(message)
    drawn = jax.tree.unflatten(structure, list(jax.random.split(key, len(leaves))))

    def noised(sent: Any, x: Any, k: PRNGKeyArray) -> Any:
        moved = jnp.where(short, x, jnp.where(long, sent + share * (x - sent), sent))
        # Selected rather than added, so that noise = 0 leaves the bits as they are.
        z = jax.random.normal(k, jnp.shape(x), jnp.result_type(x))
        return jnp.where(noise > 0, moved + noise * clip * z, moved)

    return jax.tree.map(noised, message, upload, drawn)


def check_privacy(clip: Any, noise: Any) -> None:
    """Check that clip > 0 and noise >= 0; traced values pass."""
    if isinstance(clip, int | float) and not 0 < clip <= LARGEST_STEP:
        raise UserError(f"the privacy's clip must be a finite number > 0; it is {clip}")
    if isinstance(noise, int | float) and not 0 <= noise <= LARGEST_STEP:
        raise UserError(f"the privacy's noise must be a finite number >= 0; it is {noise}")
