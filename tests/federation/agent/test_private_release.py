"""Uploads with exact noise: the clip in integers, uploads that depend on the noised integers only, and an attack."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tomli_w
from scipy.special import erf

from perfedrl.algorithms import privatize
from perfedrl.errors import UserError
from perfedrl.federation.agent.config import make_agent_config
from perfedrl.federation.agent.discrete_gaussian import ExactRandom
from perfedrl.federation.agent.private_release import (
    SIGMA,
    from_steps,
    grid_steps,
    largest_square,
    noised_upload,
)
from perfedrl.federation.agent.worker import LocalTraining, Worker

GRID = {"env": "gridworld", "width": 5}
CLIP, NOISE = 0.25, 10.0  # epsilon 0.73 at delta 1e-5
MESSAGE = {"a": np.asarray([1.0, -2.0], np.float32), "b": np.asarray([[3.0]], np.float32), "c": np.float32(0.5)}


def fixed(seed=0):
    return ExactRandom(np.random.default_rng(seed).bytes)


def moved(*by):
    a, b, c, d = np.asarray(by, np.float32)
    return {"a": MESSAGE["a"] + np.stack([a, b]), "b": MESSAGE["b"] + c, "c": MESSAGE["c"] + d}


# --- the clip, in integers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [1e-6, 0.01, 0.3, 1.0, 4.0, 11.0, 1e3, 2.0**20, 1e7])
@pytest.mark.parametrize("size", [1, 3, 300])
def test_no_displacement_is_longer_than_the_clip_in_integers(noise, size):
    rng = np.random.default_rng(size)
    for scale in (1e-3, 1.0, 1.0 + 1e-7, 1e20):
        x = rng.normal(size=size).astype(np.float32)
        upload = (x / np.linalg.norm(x) * np.float32(CLIP * scale)).astype(np.float32)
        steps = grid_steps(np.zeros(size, np.float32), upload, CLIP, noise)
        square = sum(int(n) ** 2 for n in steps)
        assert square <= largest_square(noise) <= (SIGMA / noise) ** 2 * (1 + 1e-15)
        if noise <= 11.0 and scale >= 1.0:
            assert square >= 0.999 * largest_square(noise)


def test_an_error_of_the_floating_point_length_is_mended_in_integers(monkeypatch):
    upload = np.linspace(-1, 1, 50).astype(np.float32)
    norm = np.linalg.norm
    monkeypatch.setattr(np.linalg, "norm", lambda x: 0.99999 * norm(x))
    steps = grid_steps(np.zeros(50, np.float32), upload, CLIP, 4.0)
    assert 0.999 * largest_square(4.0) < sum(int(n) ** 2 for n in steps) <= largest_square(4.0)


def test_a_short_displacement_is_rounded_towards_zero():
    grid = 1.0 * 2.0 / SIGMA
    upload = np.asarray([2.5 * grid, -2.5 * grid, 0.9 * grid], np.float32)
    assert grid_steps(np.zeros(3, np.float32), upload, 1.0, 2.0).tolist() == [2, -2, 0]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_an_upload_that_is_not_finite_counts_as_the_message(bad):
    assert grid_steps(MESSAGE, moved(0.1, bad, 0.0, 0.0), CLIP, NOISE).tolist() == [0, 0, 0, 0]
    assert grid_steps(MESSAGE, MESSAGE, CLIP, NOISE).tolist() == [0, 0, 0, 0]


# --- what is sent ----------------------------------------------------------------------------------------------------


def test_an_upload_has_the_messages_names_shapes_and_types_and_the_noise_its_deviation():
    sent = noised_upload(MESSAGE, moved(0.1, 0.2, 0.0, -0.1), CLIP, NOISE, fixed())
    assert jax.tree.structure(sent) == jax.tree.structure(MESSAGE)
    for x, y in zip(jax.tree.leaves(sent), jax.tree.leaves(MESSAGE), strict=True):
        assert (np.shape(x), x.dtype) == (np.shape(y), np.float32)
    many = noised_upload(np.zeros(20_000, np.float32), np.full(20_000, 1e-3, np.float32), 0.5, 3.0, fixed())
    assert many.std() == pytest.approx(1.5, rel=0.02)
    assert many.mean() == pytest.approx(1e-3, abs=5 * 1.5 / np.sqrt(20_000))
    with pytest.raises(UserError, match="a changed message"):
        noised_upload(MESSAGE, MESSAGE["a"], CLIP, NOISE, fixed())


class Forged(ExactRandom):
    """Noise of one's own choice."""

    def __init__(self, noise):
        super().__init__()
        self._noise = noise

    def discrete_gaussian(self, sigma, size):
        assert (sigma, size) == (SIGMA, self._noise.size)
        return self._noise


def test_every_upload_is_possible_for_every_experience():
    """Two candidates whose noises differ by the difference of their integers upload the same bits.

    Each integer noise has a positive probability, so the set of possible uploads is the same for both.
    """
    one, two = moved(0.1, 0.2, 0.0, -0.1), moved(-0.2, 0.03, 0.07, 0.0)
    apart = grid_steps(MESSAGE, one, CLIP, NOISE) - grid_steps(MESSAGE, two, CLIP, NOISE)
    assert (apart != 0).all()
    for seed in range(50):
        noise = fixed(seed).discrete_gaussian(SIGMA, 4)
        first = noised_upload(MESSAGE, one, CLIP, NOISE, Forged(noise))
        second = noised_upload(MESSAGE, two, CLIP, NOISE, Forged(noise + apart))
        for x, y in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
            assert np.asarray(x).tobytes() == np.asarray(y).tobytes()
        of_integers = from_steps(MESSAGE, grid_steps(MESSAGE, one, CLIP, NOISE) + noise, CLIP, NOISE)
        jax.tree.map(np.testing.assert_array_equal, first, of_integers)


def test_noise_too_small_for_the_grid_is_rejected_before_anything_compiles():
    table = {"clip": 1.0, "noise": 1e-12}
    with pytest.raises(UserError, match=r"noise must be 0 or at least 9\.3e-10"):
        training(table)


# --- an attack by the last bits of floating-point numbers ------------------------------------------------------------


def possible(uploads, candidate):
    """For each coordinate, whether a candidate plus some value of JAX's float32 normals is the upload.

    There are 2^23 such values; the few around the right one are tried, with and without a rounded product.
    """
    scale = np.float32(NOISE * CLIP)
    z = (uploads.astype(float) - candidate) / float(scale)
    index = np.rint((erf(z / np.sqrt(2)) + 1) * 2**22).astype(np.int64)
    found = np.zeros(uploads.shape, bool)
    lowest = np.nextafter(np.float32(-1), np.float32(0))
    for near in range(-4, 5):
        share = np.clip(index + near, 0, 2**23 - 1).astype(np.float32) * np.float32(2**-23)
        uniform = np.maximum(lowest, share * (np.float32(1) - lowest) + lowest)
        normal = np.asarray(np.float32(np.sqrt(2)) * jax.lax.erf_inv(jnp.asarray(uniform)))
        found |= candidate + scale * normal == uploads
        found |= (candidate.astype(float) + float(scale) * normal.astype(float)).astype(np.float32) == uploads
    return found


def right_guesses(upload_of, trials=200):
    """How often the candidate that explains more coordinates of an upload is the one that was uploaded."""
    rng = np.random.default_rng(0)
    directions = rng.normal(size=(2, 100)).astype(np.float32)
    two = (directions / np.linalg.norm(directions, axis=1, keepdims=True) * np.float32(0.9 * CLIP)).astype(np.float32)
    uploads = np.stack([upload_of(two[i % 2], i) for i in range(trials)])
    explained = [possible(uploads, x).sum(axis=1) for x in two]
    return int(np.sum((explained[1] > explained[0]) == np.arange(trials) % 2))


def training(table):
    own = {"name": "x", "seeds": [7], "rounds": 5, "fleet": GRID, "policy": {"name": "table"}, "privacy": table}
    own["algorithm"] = {"name": "fedavg-pg", "alpha": 0.5, "beta": 0.3, "m": 2}
    return Worker(make_agent_config({"fleet": GRID}), 0).training(tomli_w.dumps(own))


def test_the_attack_tells_candidates_apart_by_floating_point_noise():
    zero, drawn = jnp.zeros(100), jax.jit(privatize)

    def simulated(x, i):
        return np.asarray(drawn(zero, jnp.asarray(x), CLIP, NOISE, jax.random.key(i)))

    assert right_guesses(simulated) == 200


def test_an_attack_by_the_last_bits_does_not_tell_candidates_apart_in_a_network(monkeypatch):
    """Of 200 guesses at most 68 % are right by epsilon = 0.73, and so more than 175 less than once in 10^10 tests."""
    own = training({"clip": CLIP, "noise": NOISE})

    def upload_of(x, i):
        monkeypatch.setattr(LocalTraining, "_timed", lambda *_: (x.reshape(25, 4), ()))
        return own.update(np.zeros((25, 4), np.float32), (), 0)[0].ravel()

    assert right_guesses(upload_of) <= 175
