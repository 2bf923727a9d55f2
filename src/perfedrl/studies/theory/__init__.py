"""The paper's bounds beside exact quantities, and the theory of a config."""
