"""Batteries in homes with hidden tariffs, before and after one step from some of their own days."""

from perfedrl.studies.base import Study
from perfedrl.studies.homes import figures
from perfedrl.studies.homes.study import NAME, claims, configs, measurements

HOMES = Study(
    NAME,
    "Home batteries with hidden tariffs",
    configs,
    claims,
    figures.unseen_homes,
    seeds=10,
    measurements=measurements,
)
