"""What tests read from pages whose blocks they run: names of files, and lines with an ellipsis."""

import re

FILE = re.compile(r"# (\S+\.(?:py|toml))\n")
"""The first line of a block that is a file."""


def pattern(text):
    """A regular expression for a printed text; an ellipsis stands for anything in a line."""
    return ".*".join(re.escape(part) for part in text.split("…"))
