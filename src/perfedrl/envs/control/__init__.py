"""Classic control with physics of every agent's own, equal to Gymnasium's step for step where physics are equal."""

from perfedrl.envs.control.acrobot import Acrobot, acrobot
from perfedrl.envs.control.cart_pole import CartPole, cart_pole
from perfedrl.envs.control.mountain_car import (
    MountainCar,
    MountainCarContinuous,
    mountain_car,
    mountain_car_continuous,
)
from perfedrl.envs.control.pendulum import Pendulum, pendulum

__all__ = [
    "Acrobot",
    "CartPole",
    "MountainCar",
    "MountainCarContinuous",
    "Pendulum",
    "acrobot",
    "cart_pole",
    "mountain_car",
    "mountain_car_continuous",
    "pendulum",
]
