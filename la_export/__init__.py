"""Compiles a Hugging Face decoder into a bundle for `la_runtime`."""
