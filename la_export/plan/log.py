"""Receives what TensorRT says: passes it on to `logging` and keeps what is asked for later."""

from __future__ import annotations

import logging
from typing import Protocol

from la_export.plan.api import ILogger, Severity
from la_export.plan.layers import LAYERS_PREFIX
from la_export.plan.namespace import TensorRT

__all__ = ["BuildLog", "make_log"]

logger = logging.getLogger(__name__)


class BuildLog(ILogger, Protocol):
    """A logger of TensorRT that remembers.

    Args:
        layers: the message that names every layer; None before there was one.
    """

    layers: str | None

    def take_errors(self) -> tuple[str, ...]:
        """The errors since this was last called."""
        ...


def make_log(trt: TensorRT) -> BuildLog:
    """A logger for one TensorRT.

    Nothing is logged above INFO: what fails is raised, and the rest is for whoever asks.
    """

    class _Log(trt.ILogger):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.layers: str | None = None
            self._errors: list[str] = []

        def log(self, severity: Severity, msg: str) -> None:
            is_verbose = severity == trt.ILogger.VERBOSE
            logger.log(logging.DEBUG if is_verbose else logging.INFO, "%s", msg)
            if is_verbose and msg.startswith(LAYERS_PREFIX):
                self.layers = msg
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                self._errors.append(msg)

        def take_errors(self) -> tuple[str, ...]:
            taken, self._errors = tuple(self._errors), []
            return taken

    log: BuildLog = _Log()
    return log
