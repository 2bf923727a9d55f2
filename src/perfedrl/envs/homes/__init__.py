"""Homes with solar panels, batteries and tariffs, on measured loads: `homes` makes their fleets."""

from perfedrl.envs.homes.battery import CHARGE, SAVE, SELF_USE, BatteryState, HomeBattery
from perfedrl.envs.homes.fleet import homes

__all__ = ["CHARGE", "SAVE", "SELF_USE", "BatteryState", "HomeBattery", "homes"]
