"""Client sampling, and the control variates that recover its cost."""

from perfedrl.studies.base import Study, no_configs
from perfedrl.studies.client_sampling import figures
from perfedrl.studies.client_sampling.study import SEEDS, measurements, sampling_claims

CLIENT_SAMPLING = Study(
    "client-sampling",
    "Control variates against client sampling",
    no_configs,
    sampling_claims,
    figures.client_sampling,
    seeds=SEEDS,
    measurements=measurements,
)
