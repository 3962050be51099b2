"""Pages of docs/ that are written from the code, so that no fact stands in two places."""
