"""Small programs that `doctor` runs as child processes. Each prints JSON objects, one a line."""
