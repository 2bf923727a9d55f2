"""Bodies that move in a vertical plane, in JAX: MuJoCo's equations, written out for trees of rigid parts on a floor."""

from perfedrl.envs.locomotion.planar.physics import PlanarPhysics, planar_physics

__all__ = ["PlanarPhysics", "planar_physics"]
