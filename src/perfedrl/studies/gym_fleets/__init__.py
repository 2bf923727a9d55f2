"""Unseen Gymnasium cart-poles and pendulums before and after one step."""

from functools import partial

from perfedrl.studies.base import GYMNASIUM, Study
from perfedrl.studies.gym_fleets import figures, study


def study_of(setup: study.GymFleetSetup) -> Study:
    """The study of one Gymnasium fleet."""
    return Study(
        setup.name,
        setup.title,
        setup.configs,
        partial(study.claims, setup),
        partial(figures.unseen, setup),
        seeds=setup.seeds,
        extra=GYMNASIUM,
    )


CART_POLES, PENDULUMS = study_of(study.CART_POLES), study_of(study.PENDULUMS)
