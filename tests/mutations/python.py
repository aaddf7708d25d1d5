"""Mutants of Python sources, found in the syntax tree: host code, and kernels of Triton."""

import ast
import copy
from collections.abc import Iterator

from .source import Mutant, mutant

_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_NAMES = {
    "min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "all": "any",
    "any": "all",
}  # fmt: skip
# Changes of these show in no result: messages, hints to the compiler, notes for type checkers.
_NO_CODE = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)
_SPEED = {"num_stages", "num_warps", "eviction_policy", "cache_modifier", "strict"}
_HINTS = {"static_assert", "multiple_of", "max_contiguous", "debug_barrier", "warning", "info"}


def mutants(file: str, text: str, *, kernels: bool = False) -> Iterator[Mutant]:
    """Every mutant of the bodies of a file's functions; with `kernels`, of its jit functions."""
    lines = [0]
    for line in text.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))  # a running sum

    def change(node: ast.expr | ast.stmt, after: ast.expr | str, kind: str) -> Mutant:
        start = lines[node.lineno - 1] + node.col_offset
        end = lines[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        if isinstance(after, ast.expr):
            after = f"({ast.unparse(after)})"
        return mutant(file, text, start, end, after, kind)

    for function in ast.walk(ast.parse(text)):
        if isinstance(function, ast.FunctionDef) and (not kernels or _is_kernel(function)):
            for statement in function.body:
                for node in _code(statement):
                    for after, kind in _changes(node):
                        yield change(node, after, kind)


def _is_kernel(function: ast.FunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def _code(node: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """The nodes of a statement, without what shows in no result and what `mutants` visits."""
    if isinstance(node, (*_NO_CODE, ast.FunctionDef)):
        return
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):  # a docstring
        return
    if isinstance(node, ast.Call) and _called(node) in _HINTS:
        return
    if isinstance(node, (ast.expr, ast.stmt)):
        yield node
    if isinstance(node, ast.keyword) and node.arg in _SPEED:
        return
    skipped = node.annotation if isinstance(node, ast.AnnAssign) else None
    for child in ast.iter_child_nodes(node):
        if child is not skipped:
            yield from _code(child)


def _called(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


def _changes(node: ast.expr | ast.stmt) -> Iterator[tuple[ast.expr | str, str]]:
    """What may stand in a node's place, and the kind of change."""
    other = copy.deepcopy(node)
    if isinstance(node, ast.stmt):
        yield from _statements(node)
    elif isinstance(other, ast.BinOp) and type(other.op) in _OPERATORS:
        other.op = _OPERATORS[type(other.op)]()
        yield other, "operator"
    elif isinstance(other, ast.Compare):
        other.ops = [_COMPARISONS[type(op)]() for op in other.ops]
        yield other, "comparison"
    elif isinstance(other, ast.BoolOp):
        other.op = ast.Or() if isinstance(other.op, ast.And) else ast.And()
        yield other, "operator"
    elif isinstance(other, ast.UnaryOp) and isinstance(other.op, (ast.Not, ast.USub, ast.Invert)):
        yield other.operand, "condition"
    elif isinstance(other, ast.IfExp):
        other.body, other.orelse = other.orelse, other.body
        yield other, "swapped"
    elif isinstance(other, ast.Constant):
        yield from _constants(other)
    elif isinstance(other, ast.Call):
        yield from _calls(other)


def _statements(node: ast.stmt) -> Iterator[tuple[ast.expr | str, str]]:
    call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    store = isinstance(node, ast.Assign) and not isinstance(node.targets[0], (ast.Name, ast.Tuple))
    if call or store or isinstance(node, ast.AugAssign):
        yield "pass", "deleted"


def _constants(node: ast.Constant) -> Iterator[tuple[ast.expr | str, str]]:
    if isinstance(node.value, bool):
        yield str(not node.value), "flag"
    elif isinstance(node.value, int):
        yield str(node.value + 1), "constant"
    elif isinstance(node.value, float):
        yield repr(2 * node.value if node.value else 1.0), "constant"


def _calls(node: ast.Call) -> Iterator[tuple[ast.expr | str, str]]:
    name = _called(node)
    if name == "where" and len(node.args) == 3:
        yield node.args[1], "mask"
    if name in _NAMES and isinstance(node.func, ast.Attribute):
        other = copy.deepcopy(node)
        other.func = ast.Attribute(node.func.value, _NAMES[name])
        yield other, "extreme"
    for index, keyword in enumerate(node.keywords):
        if keyword.arg is not None and keyword.arg not in _SPEED:
            less = copy.deepcopy(node)
            del less.keywords[index]
            yield less, "argument"
    simple = (ast.Name, ast.Attribute)
    if len(node.args) >= 2 and all(isinstance(a, simple) for a in node.args[:2]):
        swapped = copy.deepcopy(node)
        swapped.args[:2] = swapped.args[1::-1]
        if ast.unparse(node) != ast.unparse(swapped):
            yield swapped, "swapped"
