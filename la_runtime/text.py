"""A generation's text as its tokens come, cut at stop strings."""

from __future__ import annotations

from la_runtime.tokenizer import IncrementalDecoder, Tokenizer

__all__ = ["GeneratedText"]


class GeneratedText:
    """Turns tokens into text and notices the first stop string.

    A stop string is complete with the first token behind which the text, ending there, would hold
    it. Text that may be the beginning of a stop string is held back until it is certain not to be.

    Args:
        tokenizer: of the bundle.
        stop: stop strings, none empty.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = ()) -> None:
        self._decoder = IncrementalDecoder(tokenizer)
        self._stop = stop
        self._held = ""
        self._certain: list[str] = []
        self._is_stopped = False

    def push(self, token_id: int) -> bool:
        """Read one token; True if a stop string is complete with it."""
        self._append(self._decoder.push((token_id,)))
        if self._stop and not self._is_stopped:
            self._stop_in(self._held + self._decoder.peek())
        return self._is_stopped

    def finish(self) -> None:
        """No token follows: what was held back is certain now."""
        self._append(self._decoder.flush())
        self._certain.append(self._held)
        self._held = ""

    def take(self) -> str:
        """The text that became certain since the last call."""
        text = "".join(self._certain)
        self._certain.clear()
        return text

    def _append(self, text: str) -> None:
        if self._is_stopped:
            return
        if not self._stop:
            self._certain.append(text)
            return
        self._held += text
        if self._stop_in(self._held):
            return
        certain = len(self._held) - self._num_held_back()
        self._certain.append(self._held[:certain])
        self._held = self._held[certain:]

    def _stop_in(self, text: str) -> bool:
        """End behind the first stop string of this text, if there is one."""
        starts = [place for stop in self._stop if (place := text.find(stop)) >= 0]
        if starts:
            self._certain.append(text[: min(starts)])
            self._held = ""
            self._is_stopped = True
        return self._is_stopped

    def _num_held_back(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop):
                return length
        return 0
