"""Diagnosis of a fleet before training: do agents need policies of their own, and which mechanism gives them?"""

from perfedrl.studies.diagnosis.diagnosis import Diagnosis, diagnose, diagnose_config
from perfedrl.studies.diagnosis.returns import FleetReturns
from perfedrl.studies.diagnosis.verdict import Verdict

__all__ = ["Diagnosis", "FleetReturns", "Verdict", "diagnose", "diagnose_config"]
