"""The members of a contract: what a class offers to its users, by name."""


def public_members(kind: type) -> set[str]:
    """Names of the public methods, properties and class attributes that a class defines itself."""
    return {name for name in vars(kind) if not name.startswith("_")}
