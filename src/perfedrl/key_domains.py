"""Constants that are folded into random keys.

A run's randomness is a tree: a seed's key, an agent's key below it, the key of one of the agent's rounds below that.
At each level the constants here share the 32-bit numbers with the agents' numbers or the rounds, so they must be
distinct and lie outside those ranges; `tests/test_key_domains.py` checks it. A new constant belongs in this file.
"""

LARGEST_FOLD = 2**32 - 1
"""`jax.random.fold_in` takes numbers of 32 bits."""

MOST_AGENTS = 2**31
"""Agents' numbers, training agents first and held-out agents after them, stay below this."""

MOST_ROUNDS = 2**30
"""Rounds, and the few numbers after the last round that evaluations of a finished run use, stay below this."""

START = 2**32 - 1
"""Folded into a seed's key to draw the parameters that training starts from."""

PERSONALIZATION = 2**32 - 2
"""Folded into a seed's key to personalize one agent of a finished run."""

PARTICIPATION = 2**32 - 3
"""Folded into a seed's key to draw the participants of a round."""

ESTIMATOR_COMPARISON = 2**32 - 4
"""Folded into a seed's key to draw the replicates that compare estimators."""

EVALUATION = 2**31
"""Added to the round and folded into an agent's key to measure the agent."""

DEPLOYMENT = 2**31 + 2**30
"""Added to the round and folded into an agent's key to personalize it from several budgets."""

UPLOAD_NOISE = 2**32 - 1
"""Folded into the key of an agent's round to draw the noise of a private upload."""

HEAD_STEPS = 2**32 - 2
"""Folded into the key of an agent's round to draw the local steps of a personal head."""

CLUSTER_CHOICE = 2**32 - 3
"""Folded into the key of an agent's round, or of its deployment, to choose one of several initializations."""

SEED_LEVEL = {
    "START": START,
    "PERSONALIZATION": PERSONALIZATION,
    "PARTICIPATION": PARTICIPATION,
    "ESTIMATOR_COMPARISON": ESTIMATOR_COMPARISON,
}
"""Beside the agents' numbers."""

AGENT_LEVEL = {"EVALUATION": EVALUATION, "DEPLOYMENT": DEPLOYMENT}
"""Beside the rounds; each is the first of MOST_ROUNDS numbers."""

ROUND_LEVEL = {"UPLOAD_NOISE": UPLOAD_NOISE, "HEAD_STEPS": HEAD_STEPS, "CLUSTER_CHOICE": CLUSTER_CHOICE}
"""Below the key of one agent's round, which local steps split."""
