"""How fast bundles decode, and what holds them back, measured so that figures can be compared."""
