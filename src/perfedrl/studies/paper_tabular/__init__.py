"""The paper's tabular experiments: personalization (E1), the adaptation step size (E3), learning curves (E6)."""

from perfedrl.studies.base import Study
from perfedrl.studies.paper_tabular import figures
from perfedrl.studies.paper_tabular.study import ALPHAS, configs, learning_curves, personalization, step_size

E1 = Study(
    "e1", "Personalization within federation (tabular)", configs((2.0,)), personalization, figures.personalization
)
E3 = Study("e3", "The adaptation step size alpha (tabular)", configs(ALPHAS), step_size, figures.step_size)
E6 = Study("e6", "Learning curves (tabular)", configs((2.0,)), learning_curves, figures.learning_curves)
