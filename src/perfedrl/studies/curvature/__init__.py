"""Beyond the paper: small curvature batches, and few-shot personalization."""
