"""Prints the folders outside a bundle that our packages write to."""

from __future__ import annotations

import json
import sys

from huggingface_hub import constants

from la_runtime.digests import digest_cache_path

__all__: list[str] = []

if __name__ == "__main__":
    folders = {
        "cache of digests": str(digest_cache_path().parent),
        "cache of downloaded models": constants.HF_HUB_CACHE,
    }
    for name, folder in folders.items():
        sys.stdout.write(json.dumps({"name": name, "folder": folder}) + "\n")
