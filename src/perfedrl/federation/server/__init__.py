"""The server's side of a federation."""
