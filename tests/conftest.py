"""Shapes are checked at run time throughout the tests, and two devices stand for the cores."""

import atexit
import os
import shutil
import tempfile

# The cache of compiled programs goes with the tests.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="perfedrl-tests-")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "2")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from jaxtyping import install_import_hook

with install_import_hook("perfedrl", "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"):
    import perfedrl
    import perfedrl.cli

    perfedrl.cli.application()
    for name in perfedrl.__all__:
        getattr(perfedrl, name)  # what is imported on first use is checked too

import hypothesis
import jax
import jaxtyping
import pytest
from fixtures import (  # noqa: F401
    attacked_runs,
    curvature_runs,
    deployed_runs,
    private_runs,
    quiet_runs,
    recommended_runs,
    run,
    runs_of,
    tabular_runs,
    theory_study,
)

atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)
# Examples are few and fixed: each may compile, and a test must fail for the same reason twice.
hypothesis.settings.register_profile("perfedrl", deadline=None, max_examples=20, derandomize=True)
hypothesis.settings.load_profile("perfedrl")

assert perfedrl.__version__


@pytest.fixture(autouse=True, scope="module")
def forget_programs():
    """Drop compiled programs after every file: each holds memory maps, of which a process may have only so many."""
    yield
    jax.clear_caches()


@pytest.fixture
def untyped():
    """No checks of types for one test: what a user without them meets."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def x64():
    """Double precision for one test."""
    with jax.enable_x64(True):
        yield
