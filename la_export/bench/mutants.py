"""Small faults in a module's source, one at a time: what a mutation run plants.

Changed are comparisons, `and`, `or` and `not`, conditions, arithmetic, numbers and truth values,
names such as `min` and `max`, bounds of slices, returned values, and statements that act. Left
alone are annotations, docstrings, texts, decorators, imports and `strict=` of `zip`: they declare,
or they guard against our own mistakes twice.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

__all__ = ["Mutant", "make_mutants"]

_COMPARISONS: Final[dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_OPERATORS: Final[dict[type[ast.operator], type[ast.operator]]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.BitXor: ast.BitAnd,
}
_FUNCTIONS: Final = {
    one: other
    for pair in (
        ("min", "max"),
        ("any", "all"),
        ("argmin", "argmax"),
        ("minimum", "maximum"),
        ("zeros", "ones"),
        ("union1d", "intersect1d"),
    )
    for one, other in (pair, pair[::-1])
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A module with one fault.

    Args:
        key: names it by what changes and not by its line, so that the name outlives edits
            elsewhere: function, line as `ast.unparse` writes it, and what stands there instead.
        line: of the unchanged module.
        source: the whole module with the fault.
    """

    key: str
    line: int
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slot:
    """A place in the tree that holds one node.

    Args:
        owner: dotted name of the enclosing function or class; empty for the module.
        parent: node that holds it.
        field: its field.
        index: place in the field's list; None when the field holds the node itself.
    """

    owner: str
    parent: ast.AST
    field: str
    index: int | None

    @property
    def node(self) -> ast.AST:
        held = getattr(self.parent, self.field)
        node: ast.AST = held if self.index is None else held[self.index]
        return node

    @property
    def line(self) -> int:
        for node in (self.node, self.parent):  # operators and `for` clauses have no line
            if isinstance(node, ast.stmt | ast.expr):
                return node.lineno
        return 0

    def put(self, node: ast.AST | None) -> None:
        if self.index is None:
            setattr(self.parent, self.field, node)
        else:
            getattr(self.parent, self.field)[self.index] = node


def make_mutants(source: str) -> tuple[Mutant, ...]:
    """Every mutant of a module, in the order of its source.

    Args:
        source: the module's text.
    """
    tree = ast.parse(source)
    lines = ast.unparse(tree).splitlines()
    mutants: list[Mutant] = []
    times_used: Counter[str] = Counter()
    for slot in _find_slots(tree, owner=""):
        original = slot.node
        for replacement in _find_replacements(slot):
            slot.put(replacement)
            mutated = ast.unparse(ast.fix_missing_locations(tree))
            slot.put(original)
            if mutated.splitlines() == lines:  # -1e6 and - 1e6 are one text
                continue
            key = _describe(slot.owner, lines, mutated.splitlines())
            times_used[key] += 1
            if times_used[key] > 1:
                key = f"{key} ({times_used[key]})"
            mutants.append(Mutant(key=key, line=slot.line, source=mutated))
    return tuple(sorted(mutants, key=lambda mutant: mutant.line))


def _describe(owner: str, lines: list[str], mutated: list[str]) -> str:
    assert len(lines) == len(mutated), "a mutation keeps the number of lines"
    before, after = next(
        (before, after) for before, after in zip(lines, mutated, strict=True) if before != after
    )
    return f"{owner or 'module'}: {before.strip()} => {after.strip()}"


def _find_slots(node: ast.AST, *, owner: str) -> Iterator[_Slot]:
    """Every place below a node whose node may be changed."""
    for field, held in ast.iter_fields(node):
        if _is_left_alone(node, field):
            continue
        entries = enumerate(held) if isinstance(held, list) else [(None, held)]
        for index, child in entries:
            if not isinstance(child, ast.AST) or _is_declaration(child):
                continue
            yield _Slot(owner=owner, parent=node, field=field, index=index)
            name = getattr(child, "name", None) if isinstance(child, _NAMED) else None
            inner = owner if name is None else f"{owner}.{name}".removeprefix(".")
            yield from _find_slots(child, owner=inner)


_NAMED: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def _is_left_alone(node: ast.AST, field: str) -> bool:
    if isinstance(node, ast.keyword):
        return node.arg == "strict"
    return field in {"annotation", "returns", "decorator_list", "ctx", "type_params"}


def _is_declaration(node: ast.AST) -> bool:
    match node:
        case ast.Import() | ast.ImportFrom() | ast.JoinedStr():
            return True
        case ast.Expr(value=ast.Constant()):  # a docstring
            return True
        case ast.Assign(targets=[ast.Name(id="__all__")]):
            return True
        case ast.AnnAssign(annotation=ast.Name(id="TypeAlias")):
            return True
    return False


def _find_replacements(slot: _Slot) -> Iterator[ast.AST | None]:
    """What may stand in a node's place; None leaves it out."""
    node = slot.node
    yield from _change_expression(node)
    yield from _change_statement(node)
    if slot.field in {"test", "ifs"} and not isinstance(node, ast.Compare | ast.UnaryOp):
        assert isinstance(node, ast.expr), "conditions are expressions"
        yield ast.UnaryOp(op=ast.Not(), operand=node)
    if isinstance(slot.parent, ast.Slice) and slot.field in {"lower", "upper", "step"}:
        yield None


def _change_expression(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Compare(left=left, ops=operators, comparators=comparators):
            for place, operator in enumerate(operators):
                for other in _COMPARISONS[type(operator)]:
                    changed = [*operators[:place], other(), *operators[place + 1 :]]
                    yield ast.Compare(left=left, ops=changed, comparators=comparators)
        case ast.BoolOp(op=operator, values=values):
            swapped = ast.Or() if isinstance(operator, ast.And) else ast.And()
            yield ast.BoolOp(op=swapped, values=values)
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield operand
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _OPERATORS:
            yield ast.BinOp(left=left, op=_OPERATORS[type(operator)](), right=right)
        case ast.Constant(value=bool(value)):
            yield ast.Constant(value=not value)
        case ast.Constant(value=int(value) | float(value)):
            yield ast.Constant(value=value + 1)
            yield ast.Constant(value=value - 1)
        case ast.Name(id=name) if name in _FUNCTIONS:
            yield ast.Name(id=_FUNCTIONS[name], ctx=node.ctx)
        case ast.Attribute(value=value, attr=name) if name in _FUNCTIONS:
            yield ast.Attribute(value=value, attr=_FUNCTIONS[name], ctx=node.ctx)


def _change_statement(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Return(value=value) if value is not None and not _is_none(value):
            yield ast.Return(value=ast.Constant(value=None))
        case ast.Raise() | ast.Assert() | ast.AugAssign() | ast.Expr():
            yield ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield ast.Pass()
        case ast.Break():
            yield ast.Continue()
        case ast.Continue():
            yield ast.Break()


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None
