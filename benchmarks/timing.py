"""Clocks, and the printing of measured numbers beside their targets, for all benchmarks."""

import time

import jax
import numpy as np
from rich.console import Console

console = Console()


def clock(f) -> float:
    began = time.perf_counter()
    f()
    return time.perf_counter() - began


def clock_cold(f) -> float:
    """Seconds of the first call, including compilation."""
    jax.clear_caches()
    return clock(f)


def target(what: str, value: float, at_least: float = -np.inf, at_most: float = np.inf) -> None:
    """Print a number beside its target."""
    bound = f"at least {at_least:g}" if np.isfinite(at_least) else f"at most {at_most:g}"
    met = "met" if at_least <= value <= at_most else "NOT MET"
    console.print(f"{value:.2f} {what} ({bound}: {met})", highlight=False, soft_wrap=True)
