"""Thirty people with type 1 diabetes, in JAX. A simulator for research; nothing in it is medical advice."""

from perfedrl.envs.glucose.fleet import glucose
from perfedrl.envs.glucose.task import GlucoseDay

__all__ = ["GlucoseDay", "glucose"]
