"""Gymnasium environments as agents. Gymnasium itself is imported when a fleet is made."""

from perfedrl.envs.gym.check import EnvironmentCheck, check_env
from perfedrl.envs.gym.fleet import GymTask, gymnasium_fleet

__all__ = ["EnvironmentCheck", "GymTask", "check_env", "gymnasium_fleet"]
