from __future__ import annotations

import ast

import pytest

from la_export.bench.mutants import make_mutants


def changes(source: str) -> list[str]:
    """What each mutant changes, without its function."""
    return [mutant.key.partition(": ")[2] for mutant in make_mutants(source)]


@pytest.mark.parametrize(
    ("line", "mutated"),
    [
        ("x = a < b", ["x = a <= b", "x = a >= b"]),
        ("x = a >= b", ["x = a > b", "x = a < b"]),
        ("x = a == b", ["x = a != b"]),
        ("x = a is None", ["x = a is not None"]),
        ("x = a not in b", ["x = a in b"]),
        (
            "x = a <= b < c",
            ["x = a < b < c", "x = a > b < c", "x = a <= b <= c", "x = a <= b >= c"],
        ),
        ("x = a and b and c", ["x = a or b or c"]),
        ("x = not a", ["x = a"]),
        ("x = -a", ["x = a"]),
        ("x = a + b", ["x = a - b"]),
        ("x = a ^ b", ["x = a & b"]),
        ("x = 7", ["x = 8", "x = 6"]),
        ("x = 0.5", ["x = 1.5", "x = -0.5"]),
        ("x = True", ["x = False"]),
        ("x = min(a, key=b)", ["x = max(a, key=b)"]),
        ("x = np.maximum(a, b)", ["x = np.minimum(a, b)"]),
        ("x = a[b:c]", ["x = a[:c]", "x = a[b:]"]),
        ("x = a if b else c", ["x = a if not b else c"]),
        ("x = [a for a in b if a]", ["x = [a for a in b if not a]"]),
        ("x = lambda a=1: a", ["x = lambda a=2: a", "x = lambda a=0: a"]),
        ("x: int = 3", ["x: int = 4", "x: int = 2"]),
        ("x += y", ["pass"]),
        ("x.y = z", ["pass"]),
        ("x[y] = z", ["pass"]),
        ("f(x)", ["pass"]),
        ("assert x, 'text'", ["pass", "assert not x, 'text'"]),
        ("raise x", ["pass"]),
    ],
)
def test_every_kind_of_change(line: str, mutated: list[str]) -> None:
    assert changes(line) == [f"{line} => {after}" for after in mutated]


def test_returns_loops_and_conditions_change() -> None:
    source = (
        "def f():\n    while x:\n        if y:\n            break\n        continue\n    return z\n"
    )

    assert changes(source) == [
        "while x: => while not x:",
        "if y: => if not y:",
        "break => continue",
        "continue => break",
        "return z => return None",
    ]


@pytest.mark.parametrize(
    "source",
    [
        "import a",
        '"""A docstring."""',
        "def f(a: Literal[1]) -> Literal[2]:\n    '''Text.'''",
        "@decorated(maxsize=1)\ndef f():\n    pass",
        "@dataclass(frozen=True)\nclass A:\n    pass",
        "__all__ = ['a' + 'b']",
        "x = 'text'",
        "x = f'{1 + 1}'",
        "x: TypeAlias = int | str",
        "x = zip(a, b, strict=True)",
        "def f():\n    return None",
    ],
)
def test_declarations_and_texts_are_left_alone(source: str) -> None:
    assert changes(source) == []


def test_each_mutant_is_the_module_with_one_line_changed() -> None:
    source = "def f(a):\n    b = a + 1\n    return b\n\n\ndef g(a):\n    return f(a) * 2\n"
    lines = ast.unparse(ast.parse(source)).splitlines()

    mutants = make_mutants(source)

    for mutant in mutants:
        differ = [
            (before, after)
            for before, after in zip(lines, mutant.source.splitlines(), strict=True)
            if before != after
        ]
        ((before, after),) = differ
        assert mutant.key.partition(": ")[2] == f"{before.strip()} => {after.strip()}"
    assert [mutant.line for mutant in mutants] == [2, 2, 2, 3, 7, 7, 7, 7]


def test_keys_name_the_function_and_survive_lines_added_elsewhere() -> None:
    source = "class A:\n    def f(self):\n        return 1\n"

    keys = [mutant.key for mutant in make_mutants(source)]

    assert keys == [
        "A.f: return 1 => return None",
        "A.f: return 1 => return 2",
        "A.f: return 1 => return 0",
    ]
    assert [m.key for m in make_mutants("# A comment.\n\nx = y\n" + source)] == keys


def test_equal_changes_of_one_function_are_told_apart() -> None:
    keys = [mutant.key for mutant in make_mutants("def f():\n    g()\n    g()\n")]

    assert keys == ["f: g() => pass", "f: g() => pass (2)"]
