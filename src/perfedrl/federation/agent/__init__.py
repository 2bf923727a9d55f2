"""One agent of a federation: its settings, its daemon, its computation, and the answers it stores."""
