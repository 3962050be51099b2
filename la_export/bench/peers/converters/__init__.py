"""Scripts that make a peer's weight files in that peer's environment."""
