"""Where models come from: local folders, GGUF files, the Hugging Face hub, known names.

`sources` finds the files, `features` refuses what cannot be exported, `checkpoint` reads.
"""

from __future__ import annotations

from la_export.checkpoint.checkpoint import Checkpoint, load_checkpoint
from la_export.checkpoint.known_models import KNOWN_MODELS, find_known_model
from la_export.checkpoint.sources import ModelSource, find_model, name_place
from la_export.checkpoint.weight_files import WeightFormat

__all__ = [
    "KNOWN_MODELS",
    "Checkpoint",
    "ModelSource",
    "WeightFormat",
    "find_known_model",
    "find_model",
    "load_checkpoint",
    "name_place",
]
