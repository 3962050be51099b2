"""Tunes lookaheads of a frozen model on text that it writes itself."""
