from __future__ import annotations

from dataclasses import dataclass

from la_export.plan.problems import describe_build_errors, describe_parser_errors

ECHO = "[checkMacros.cpp::catchCudaError::250] Error Code 1: Cuda Runtime (cudaError 35)"


@dataclass
class _Error:
    index: int
    name: str
    operator: str
    reason: str

    def node(self) -> int:
        return self.index

    def node_name(self) -> str:
        return self.name

    def node_operator(self) -> str:
        return self.operator

    def desc(self) -> str:
        return self.reason


class _Parser:
    def __init__(self, *errors: _Error) -> None:
        self.errors = errors
        self.num_errors = len(errors)

    def parse_from_file(self, model: str) -> bool:
        raise AssertionError(model)

    def get_error(self, index: int) -> _Error:
        return self.errors[index]


def test_every_parser_error_is_told_with_node_operator_and_reason() -> None:
    parser = _Parser(
        _Error(3, "layer0.attention", "Attention", f"Invalid Node\nno {{softcap}}\n{ECHO}"),
        _Error(7, "", "QuickGelu", "Plugin not found"),
        _Error(-1, "", "", "Failed to parse the ONNX model."),
    )

    assert describe_parser_errors(parser) == (
        "node 3 'layer0.attention', operator Attention: Invalid Node no {softcap}; "
        "node 7, operator QuickGelu: Plugin not found; "
        "Failed to parse the ONNX model."
    )


def test_build_errors_are_told_once_and_without_their_echo() -> None:
    assert describe_build_errors(["one", "two ", ECHO, "one"]) == "one; two"


def test_silence_is_said() -> None:
    assert describe_parser_errors(_Parser()) == "it gives no reason"
    assert describe_build_errors([ECHO]) == "it gives no reason"
