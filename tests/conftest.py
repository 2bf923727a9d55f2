"""Set up a test session: one cache of compiled programs, two CPU devices, a quick compiler or checks of types.

`make test` compiles with settings of XLA that halve the time. `make test-all` compiles as users do, and checks types.

All worker processes share the cache of compiled programs. It starts empty and is removed at the end; set
PERFEDRL_TEST_CACHE to a folder to keep it between sessions.
"""

import atexit
import gc
import importlib
import importlib.metadata
import os
import platform
import shutil
import tempfile

import hypothesis
import pytest


def prepare_environment() -> None:
    """Choose folders and devices, before JAX is imported; worker processes inherit the choice of the first process."""
    if "PERFEDRL_TEST_FOLDER" not in os.environ:
        scratch = os.environ["PERFEDRL_TEST_FOLDER"] = tempfile.mkdtemp(prefix="perfedrl-tests-")
        atexit.register(shutil.rmtree, scratch, ignore_errors=True)
    scratch = os.environ["PERFEDRL_TEST_FOLDER"]
    os.environ["XDG_CACHE_HOME"] = os.environ["XDG_DATA_HOME"] = scratch
    os.environ["JAX_COMPILATION_CACHE_DIR"] = os.environ.get("PERFEDRL_TEST_CACHE", os.path.join(scratch, "compiled"))
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    os.environ.setdefault("JAX_NUM_CPU_DEVICES", "2")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")


prepare_environment()

QUICK_COMPILER = {
    ("0.10", "x86_64"): "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true --xla_cpu_max_isa=AVX"
}
"""Release of JAX, processor -> settings of XLA that compile faster, to programs that may round differently.

At level 0 it depends on the shapes of a program which products and sums become one instruction with one rounding; AVX
has no such instruction, so that bits do not depend on the number of seeds there either. XLA aborts the process at a
setting that it does not know, so other releases and processors get none.
"""


def pytest_configure(config):
    """Choose how much is tried; where that is everything, import the package with run-time checks of types.

    A process that only hands out tests to its workers imports nothing.
    """
    tries_all = "not slow" not in config.getoption("markexpr")
    os.environ["PERFEDRL_TEST_TIER"] = "all" if tries_all else "fast"
    if not tries_all:
        release = importlib.metadata.version("jax").rpartition(".")[0]
        os.environ.setdefault("XLA_FLAGS", QUICK_COMPILER.get((release, platform.machine()), ""))
    # Few and fixed examples: each may compile, and a test must fail for the same reason twice.
    few = {"deadline": None, "max_examples": 20 if tries_all else 5, "derandomize": True}
    hypothesis.settings.register_profile("perfedrl", **few)
    hypothesis.settings.load_profile("perfedrl")
    # Tracing makes many objects that live on; a search for garbage after every few hundred takes a tenth of the time.
    gc.set_threshold(20_000, 20, 20)
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        if tries_all:
            import_with_checks()
        # Not by name: pytest takes "fixtures" for a plugin of its own.
        config.pluginmanager.register(importlib.import_module("fixtures"), "perfedrl-fixtures")


def import_with_checks() -> None:
    """Import the whole package so that calls check the shapes and types of their arguments."""
    from jaxtyping import install_import_hook

    with install_import_hook("perfedrl", "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"):
        import perfedrl
        import perfedrl.cli

        perfedrl.cli.application()
        for name in perfedrl.__all__:
            getattr(perfedrl, name)


@pytest.fixture(autouse=True, scope="module")
def limit_memory_maps():
    """Drop compiled programs after a file once they hold many memory maps, of which a process may have only so many.

    Later files find the programs on disk.
    """
    yield
    import jax

    if memory_maps() > 12_000:
        jax.clear_caches()


def memory_maps() -> float:
    """How many memory maps this process holds; infinity where the system does not tell."""
    try:
        with open("/proc/self/maps") as lines:
            return sum(1 for _ in lines)
    except OSError:
        return float("inf")


@pytest.fixture
def untyped():
    """Switch the run-time checks of types off for one test, as for a user without them."""
    import jaxtyping

    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def x64():
    """Use double precision for one test."""
    import jax

    with jax.enable_x64(True):
        yield
