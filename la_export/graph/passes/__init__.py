"""Graph passes, one a file. Each changes a `StepGraph` in place and knows no other pass."""
