"""What TensorRT finds wrong with a graph or a build, whole and readable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from la_export.plan.api import OnnxParser, ParserError

__all__ = ["describe_build_errors", "describe_parser_errors"]

# Said after another error where there is no driver; it explains nothing of its own.
_ECHO: Final = "catchCudaError"


def describe_parser_errors(parser: OnnxParser) -> str:
    """Every error of a parser: node, operator, reason."""
    problems = [_describe(parser.get_error(index)) for index in range(parser.num_errors)]
    return "; ".join(problems) or "it gives no reason"


def _describe(error: ParserError) -> str:
    reason = " ".join(line for line in error.desc().splitlines() if _ECHO not in line).strip()
    operator = error.node_operator()
    if not operator:
        return reason
    name = f" {error.node_name()!r}" if error.node_name() else ""
    return f"node {error.node()}{name}, operator {operator}: {reason}"


def describe_build_errors(errors: Sequence[str]) -> str:
    """What a builder logged as errors."""
    told = dict.fromkeys(error.strip() for error in errors if _ECHO not in error)
    return "; ".join(told) or "it gives no reason"
