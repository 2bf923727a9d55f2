"""The return that differentially private uploads cost."""

from perfedrl.studies.base import DP_ACCOUNTING, Study
from perfedrl.studies.privacy import figures
from perfedrl.studies.privacy.study import privacy_configs, private

PRIVACY = Study("privacy", "What privacy costs", privacy_configs, private, figures.private, extra=DP_ACCOUNTING)
