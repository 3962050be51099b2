"""Measuring: the prompts, the result files, and the tables made of them."""
