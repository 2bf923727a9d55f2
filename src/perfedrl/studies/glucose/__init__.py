"""People with type 1 diabetes, personalized from a few of their own days."""

from perfedrl.studies.base import Study
from perfedrl.studies.glucose import figures, study

GLUCOSE = Study(
    study.NAME,
    "People with type 1 diabetes after one step from their own days",
    study.configs,
    study.claims,
    figures.glucose,
    seeds=study.SEEDS,
    measurements=study.measurements,
)
