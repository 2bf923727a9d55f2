"""Classic control in JAX: agents differ in their physics; with default physics, steps equal Gymnasium's."""

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
