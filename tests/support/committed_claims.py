"""Checks that the claims of studies are those committed under results/ and written in the documentation."""

from pathlib import Path

import numpy as np

from perfedrl.studies.claims import cells

DOCS = Path(__file__).parents[2] / "docs"


def check_committed(claims, committed) -> None:
    """Check names and verdicts of claims against committed ones, and their measured values up to rounding."""
    names = [(c["experiment"], c["claim"], c["met"]) for c in committed]
    assert [(c.experiment, c.claim, c.met) for c in claims] == names
    np.testing.assert_allclose([c.measured for c in claims], [c["measured"] for c in committed])


def check_on_page(claims, page: str) -> None:
    """Check that a page of the documentation has the table row of each claim."""
    text = (DOCS / page).read_text()
    for claim in claims:
        assert "| " + " | ".join(cells(claim)) + " |" in text, f"docs/{page} lacks {claim}"
