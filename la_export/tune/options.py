"""What a tuning is asked to do. Knows no library, so that a wrong value is refused at once."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from la_export.options import LARGEST_K
from la_runtime.errors import UsageError
from la_runtime.group_mask import GroupMask

__all__ = ["NO_RANK", "TuneOptions", "parse_adapter"]

NO_RANK: Final = 0
_LARGEST_RANK: Final = 256
_LORA: Final = re.compile(r"lora:(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions:
    """What to tune.

    Args:
        model: folder, `.gguf` file, hub id or known name.
        k: lookahead vectors to train; a bundle may serve any k up to it.
        rank: of the adapter; `NO_RANK` trains the vectors alone.
        group_mask: what a slot sees of its own group.
        minutes: that everything together may take.
        steps: of training, at most; as many as there is time for when not given.
        texts: that the model writes, at most.
        text_tokens: of a text, at most.
        out: file to write; `engines/<name>-lookahead.safetensors` when not given.
        revision: hub revision.
        threads: CPU threads; PyTorch's own choice when not given.
        allow_bin: whether pickle-based weights may be read, weights only.

    Raises:
        UsageError: a value is out of range.
    """

    model: str
    k: int = 8
    rank: int = 16
    group_mask: GroupMask = GroupMask.STRICT
    minutes: float = 30.0
    steps: int | None = None
    texts: int = 2048
    text_tokens: int = 256
    out: Path | None = None
    revision: str | None = None
    threads: int | None = None
    allow_bin: bool = False

    def __post_init__(self) -> None:
        bounds = (
            ("--k", self.k, 1, LARGEST_K),
            ("--adapter lora", self.rank, 0, _LARGEST_RANK),
            ("--steps", self.steps, 1, None),
            ("--texts", self.texts, 2, None),
            ("--text-tokens", self.text_tokens, 16, None),
            ("--threads", self.threads, 1, None),
        )
        for name, value, least, most in bounds:
            if value is None:
                continue
            if value < least or (most is not None and value > most):
                expected = f"at least {least}" if most is None else f"{least} to {most}"
                raise UsageError(f"{name} {value} is out of range; expected {expected}")
        if not 0 < self.minutes < float("inf"):
            raise UsageError(f"--minutes {self.minutes:g} is out of range; expected more than 0")


def parse_adapter(text: str) -> int:
    """The rank of an adapter as the command line has it.

    Raises:
        UsageError: it is neither ``none`` nor ``lora:R``.
    """
    if text == "none":
        return NO_RANK
    found = _LORA.fullmatch(text)
    if found is None or not int(found[1]):
        raise UsageError(
            f"--adapter {text!r} is not known; expected none, or lora:R with a rank R such as "
            "lora:16"
        )
    return int(found[1])
