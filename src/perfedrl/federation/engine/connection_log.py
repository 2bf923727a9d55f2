"""The server's log of refused connections, and of agents that moved to another process."""

from pathlib import Path


class ConnectionLog:
    """Reads the lines that the server's driver writes; a log that grew too long was begun anew."""

    def __init__(self, path: Path):
        self.path = path
        self._read = len(self.lines())

    def lines(self) -> list[str]:
        """All lines."""
        try:
            return self.path.read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return []

    def new_lines(self) -> list[str]:
        """The lines since the last call, or since this object was made."""
        lines = self.lines()
        new = lines[self._read :] if len(lines) >= self._read else lines
        self._read = len(lines)
        return new

    def last(self, name: str) -> str | None:
        """The last line about an agent."""
        return next((line for line in reversed(self.lines()) if f" {name} " in line), None)
