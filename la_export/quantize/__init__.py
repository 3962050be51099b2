"""Weights in few bits: how numbers become integers, and what that costs a model."""
