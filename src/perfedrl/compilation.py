"""Compilation: options, devices and the cache on disk. Compiler flags appear in this file only."""

import os
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache, wraps
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import jax
from platformdirs import user_cache_dir

from perfedrl.memory import Need, check_memory, estimate

OPTIONS: dict[str, dict[str, Any]] = {
    "cpu": {
        # Level 1 compiles about four times faster than the default and runs as fast; level 0 runs several times slower.
        "xla_backend_optimization_level": 1,
        # YNN's order of summation in large reductions depends on the size of the whole array, so that a seed's result
        # would depend on the number of parallel seeds.
        "xla_cpu_experimental_ynn_fusion_type": "",
    },
    # By default parallel additions into one cell happen in any order, and runs would differ in their last bits. The
    # deterministic kernels cost a factor of 1.5 for ten seeds of the gridworld, and of 3 for a thousand.
    "gpu": {"xla_gpu_exclude_nondeterministic_ops": True},
}

MIN_COMPILE_TIME = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"


@runtime_checkable
class Jitted(Protocol):
    """A function that is compiled on its first call with arguments of new shapes."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function; a program that does not fit into memory is rejected before it is compiled."""
        ...

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """The traced program for some arguments, which a later call uses."""
        ...

    def need(self, *args: Any, **kwargs: Any) -> Need:
        """The estimated memory of a call."""
        ...

    def compilations(self) -> int:
        """The number of compiled programs."""
        ...


def jit(f: Callable[..., Any], **kwargs: Any) -> Jitted:
    """Apply `jax.jit` with the options for the backend in use; inside another jit the function is simply called."""

    @lru_cache
    def compiled(backend: str):
        return jax.jit(f, compiler_options=options(backend), **kwargs)

    def trace(*args, **kwargs):
        return compiled(jax.default_backend()).trace(*args, **kwargs)

    def need(*args, **kwargs) -> Need:
        return estimate(trace(*args, **kwargs).jaxpr)

    @wraps(f)
    def call(*args, **kwargs):
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((args, kwargs))):
            return f(*args, **kwargs)
        check_memory(need(*args, **kwargs))
        return compiled(jax.default_backend())(*args, **kwargs)

    call.trace, call.need = trace, need  # type: ignore[attr-defined]
    call.compilations = lambda: compiled(jax.default_backend())._cache_size()  # type: ignore[attr-defined]
    return cast(Jitted, call)


@lru_cache
def options(backend: str) -> dict[str, Any]:
    """Return the options for a backend that this version of JAX knows and that XLA_FLAGS does not set."""
    flags = [flag.partition("=")[0] for flag in os.environ.get("XLA_FLAGS", "").split()]
    wanted = {name: value for name, value in OPTIONS.get(backend, {}).items() if f"--{name}" not in flags}
    return {name: value for name, value in wanted.items() if _known(name, value)}


def _known(name: str, value: Any) -> bool:
    try:
        jax.jit(lambda x: x).lower(0).compile(compiler_options={name: value})
    except jax.errors.JaxRuntimeError:
        return False
    return True


def enable_cache() -> Path | None:
    """Cache compiled programs on disk, in the user's cache folder, and return that folder.

    JAX_COMPILATION_CACHE_DIR overrides the folder. Programs are cached whose compilation takes at least 0.1 s, or
    JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS.
    """
    if jax.config.values["jax_compilation_cache_dir"] is None:
        folder = Path(user_cache_dir("perfedrl")) / "compiled"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            return None  # with a read-only home, run without the cache
        jax.config.update("jax_compilation_cache_dir", str(folder))
    if MIN_COMPILE_TIME not in os.environ:
        jax.config.update(MIN_COMPILE_TIME.lower(), 0.1)
    return Path(jax.config.values["jax_compilation_cache_dir"])


def use_all_cores() -> None:
    """Make each CPU core a device of JAX, so that seeds run in parallel. It has no effect once JAX was used.

    Results do not depend on it. JAX_NUM_CPU_DEVICES overrides the number.
    """
    if jax.config.values["jax_num_cpu_devices"] < 1:
        with suppress(RuntimeError):  # JAX is in use already and keeps its devices
            jax.config.update("jax_num_cpu_devices", available_cores())


def available_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
