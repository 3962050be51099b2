"""Proof that a bundle's output is the model's own."""
