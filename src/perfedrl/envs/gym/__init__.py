"""Gymnasium environments as agents. Gymnasium itself is imported when a fleet is made."""

from perfedrl.envs.gym.fleet import GymTask, gymnasium_fleet

__all__ = ["GymTask", "gymnasium_fleet"]
