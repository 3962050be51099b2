"""Other programs that decode the same model on the same prompts: their environments, their weights,
and a race in which they and bundles of ours take turns. `scripts/bench_peers` runs it.
"""
