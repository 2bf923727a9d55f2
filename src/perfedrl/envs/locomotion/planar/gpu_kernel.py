"""A decision of many planar bodies as one kernel on a GPU, with a thread for each body.

XLA compiles the same equations to some hundred small kernels for each step of the physics, and starting these takes
most of the time. Here Pallas writes the equations into one kernel, through Triton.
"""

import importlib.util
import os
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jaxtyping import Float

from perfedrl.types import Array

BODIES = 32
"""Bodies of a program of the kernel: the threads of one warp."""

Equations = Callable[[list[Any]], tuple[Any, ...]]
"""Maps a body's input numbers to its output numbers, by elementwise arithmetic and loops of fixed length."""


SWITCH = "PERFEDRL_GPU_KERNELS"
"""The environment variable that turns such kernels off where it is "off"."""


def has_kernels(kind: Any) -> bool:
    """Whether this process computes on an NVIDIA GPU, in a precision and with a JAX that such kernels are made for."""
    if jax.default_backend() != "gpu" or kind != jnp.float32 or os.environ.get(SWITCH) == "off":
        return False
    if not jax.local_devices()[0].device_kind.startswith("NVIDIA"):
        return False
    return importlib.util.find_spec("jax.experimental.pallas.triton") is not None


@lru_cache
def in_one_kernel(
    equations: Equations, outputs: int, interpret: bool = False
) -> Callable[[Float[Array, "*batch inputs"]], Float[Array, "*batch outputs"]]:
    """Return a function of arrays of bodies that applies the equations to all of them in one kernel.

    Axes that `jax.vmap` adds become part of the batch. With `interpret` the kernel is emulated, on any device.
    """

    @custom_vmap
    def apply(x: Float[Array, "*batch inputs"]) -> Float[Array, "*batch outputs"]:
        flat = x.reshape(-1, x.shape[-1]).T
        padded = jnp.pad(flat, ((0, 0), (0, -flat.shape[1] % BODIES)))
        found = launch(equations, outputs, padded, interpret)[:, : flat.shape[1]]
        return found.T.reshape(*x.shape[:-1], outputs)

    @apply.def_vmap
    def batched(_: int, __: list[bool], x: Float[Array, "*batch inputs"]) -> tuple[Any, bool]:
        return apply(x), True

    return apply


def launch(
    equations: Equations, outputs: int, x: Float[Array, "inputs n"], interpret: bool
) -> Float[Array, "outputs n"]:
    """Run the kernel for columns of bodies, whose number is a multiple of `BODIES`."""
    from jax.experimental import pallas
    from jax.experimental.pallas import triton

    inputs, bodies = x.shape

    def kernel(x_ref: Any, y_ref: Any) -> None:
        own = pallas.ds(pallas.program_id(0) * BODIES, BODIES)
        for i, y in enumerate(equations([x_ref[i, own] for i in range(inputs)])):
            y_ref[i, own] = y

    return pallas.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((outputs, bodies), x.dtype),
        grid=(bodies // BODIES,),
        compiler_params=triton.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
    )(x)
