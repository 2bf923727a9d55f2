"""The locomotion families of meta-reinforcement learning. MuJoCo itself is imported when a fleet is made."""

from perfedrl.envs.locomotion.families import (
    ant_dir,
    ant_goal,
    half_cheetah_dir,
    half_cheetah_vel,
    hopper_mass,
    walker_mass,
)

__all__ = ["ant_dir", "ant_goal", "half_cheetah_dir", "half_cheetah_vel", "hopper_mass", "walker_mass"]
