"""Fleets of environments that others wrote in JAX, with the interfaces of gymnax and of Brax."""

from perfedrl.envs.adapters.brax_fleet import brax_fleet
from perfedrl.envs.adapters.gymnax_fleet import gymnax_fleet

__all__ = ["brax_fleet", "gymnax_fleet"]
