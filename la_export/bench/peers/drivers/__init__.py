"""Scripts that run in the peers' environments. They import nothing of this project."""
