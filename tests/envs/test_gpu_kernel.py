"""Equations of bodies in one kernel, emulated, against the same equations on arrays."""

from types import SimpleNamespace

import jax
import numpy as np

from perfedrl.envs.locomotion.planar.gpu_kernel import BODIES, SWITCH, has_kernels, in_one_kernel


def equations(row):
    """A pendulum's angle and speed after a loop of steps, from angle, speed and torque."""
    angle, speed, torque = row

    def step(_, now):
        return now[0] + 0.1 * now[1], now[1] - 0.1 * (jax.numpy.sin(now[0]) - torque)

    return jax.lax.fori_loop(0, 3, step, (angle, speed))


def test_a_kernel_computes_its_equations_for_every_body_of_nested_batches():
    """More bodies than one program of the kernel takes, and not a multiple of them."""
    x = np.random.default_rng(0).normal(size=(3, BODIES // 2 + 1, 3)).astype(np.float32)
    kernel = in_one_kernel(equations, 2, interpret=True)
    expected = np.stack(equations(np.moveaxis(x, -1, 0)), axis=-1)
    for found in (jax.vmap(jax.vmap(kernel))(x), jax.vmap(kernel)(x), kernel(x), jax.jit(jax.vmap(kernel, 1, 1))(x)):
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    np.testing.assert_allclose(kernel(x[0, 0]), expected[0, 0], rtol=1e-6)


def test_kernels_are_for_single_precision_on_gpus_unless_they_are_turned_off(monkeypatch):
    assert not has_kernels(np.float32), "this is a CPU"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(device_kind="NVIDIA H200")])
    assert has_kernels(np.float32)
    assert not has_kernels(np.float64)
    monkeypatch.setenv(SWITCH, "off")
    assert not has_kernels(np.float32)
