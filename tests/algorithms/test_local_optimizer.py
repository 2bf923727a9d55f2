"""Optimizers of local steps are optax's, with states of numbers that can be averaged."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import perfedrl as pf
from perfedrl.algorithms.local_optimizer import OPTIMIZERS, LocalOptimizer, frozen_settings

PARAMS = {"a": jnp.array([1.0, -2.0]), "b": jnp.array(0.5)}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_three_steps_of_ascent_are_optaxs_along_the_negative_gradient(name):
    own, theirs = LocalOptimizer(name), vars(optax)[name](learning_rate=0.1)
    params, state = PARAMS, own.init(PARAMS)
    expected, expected_state = PARAMS, theirs.init(PARAMS)
    assert all(jnp.issubdtype(x.dtype, jnp.floating) for x in jax.tree.leaves(state))
    for i in range(3):
        gradient = jax.tree.map(lambda x, i=i: jnp.sin(x + i), PARAMS)
        ascent, state = own.step(params, gradient, state, 0.1)
        params = optax.apply_updates(params, ascent)
        descent = jax.tree.map(jnp.negative, gradient)
        change, expected_state = theirs.update(descent, expected_state, expected)
        expected = optax.apply_updates(expected, change)
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    assert np.abs(params["a"] - PARAMS["a"]).max() > 1e-3


def test_settings_reach_the_optimizer_and_counts_survive_averaging():
    heavy = LocalOptimizer("sgd", "averaged", frozen_settings({"momentum": 0.9, "nesterov": True}))
    state = heavy.init(PARAMS)
    change, state = heavy.step(PARAMS, PARAMS, state, 0.1)
    np.testing.assert_allclose(change["b"], 0.1 * 1.9 * 0.5, rtol=1e-6)
    adam = LocalOptimizer("adam")
    _, state = adam.step(PARAMS, PARAMS, adam.init(PARAMS), 0.1)
    mean = jax.tree.map(lambda x: jnp.mean(jnp.stack([x] * 3) * (1 - 1e-7), axis=0), state)
    exact, rounded = (adam.step(PARAMS, PARAMS, s, 0.1)[1] for s in (state, mean))
    assert float(exact[0].count) == float(rounded[0].count) == 2.0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("adma", "averaged", {}), "there is no optimizer 'adma'; did you mean .*'adam'"),
        (("adam", "kept", {}), "the optimizer_state must be 'averaged' or 'personal' or 'reset'; it is 'kept'"),
        (("adam", "reset", {"momentum": 0.9}), "the optimizer 'adam' has no setting 'momentum'"),
        (("sgd", "reset", {"momentum": "much"}), "momentum must be a number"),
        (("sgd", "reset", 0.9), "optimizer_settings must be a table"),
    ],
)
def test_bad_settings_are_one_sentence(arguments, said, untyped):
    name, state, settings = arguments
    with pytest.raises(pf.UserError, match=said):
        LocalOptimizer(name, state, frozen_settings(settings))
