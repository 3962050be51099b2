"""Settings of the whole test run."""

from __future__ import annotations

import os

from hypothesis import settings

# Property tests draw the same examples every time and have no deadline: the machine's load must
# never decide a result. `HYPOTHESIS_PROFILE=search` looks for new counterexamples.
settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=100)
settings.register_profile("search", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

# No test may reach a hub; transformers then says so at once instead of waiting for the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
