"""The sentences that the sources can say, read out of their syntax trees.

A sentence is shown as a page quotes it: adjacent literals are one, and what is filled in when it is
said stands as "…".
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

from expert_network import errors
from expert_network.errors import ExpertNetworkError

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "expert_network",
    "protocol/expert_protocol",
    "roster/expert_roster",
    "node/expert_node",
    "driver/expert_driver",
)
FILLED_IN = "…"

#: Who else brings a sentence to a person, and what its parameters are called.
_OTHERS = {
    "UsageError": ("message",),
    "BadParameter": ("message",),
    "ErrorReply": ("code", "message"),
    "HTTPServiceUnavailable": (),
}
#: Parameters that say what to do about a problem, not what it is.
_ADVICE = ("advice",)

_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Sentence:
    """`text` is given at `where` (file:line) to `maker`: an error's class, or a helper's name."""

    where: str
    maker: str
    text: str


def error_classes() -> list[type[ExpertNetworkError]]:
    """Every class of errors.py, the root first."""
    found = (value for value in vars(errors).values() if inspect.isclass(value))
    return [value for value in found if issubclass(value, ExpertNetworkError)]


@cache
def literals() -> tuple[str, ...]:
    """Every string of the sources but docstrings."""
    return tuple(
        text
        for module in _modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Constant | ast.JoinedStr) and node not in module.docstrings
        for text in _text(node)
    )


@cache
def sentences() -> tuple[Sentence, ...]:
    """What errors are made with, followed through variables and helpers, without the advice.

    Not every way is followed: a sentence that is given through a dict, say, is not found.
    """
    modules = _modules()
    found = [sentence for module in modules for sentence in module.sentences(_helpers(modules))]
    return tuple(sorted(set(found), key=lambda sentence: sentence.where))


_Parameters = dict[str, tuple[str, ...]]


class _Module:
    def __init__(self, path: Path) -> None:
        self.name = path.relative_to(ROOT).as_posix()
        self.tree = ast.parse(path.read_text(encoding="utf-8"))
        self.functions = {
            node.name: node for node in ast.walk(self.tree) if isinstance(node, _Function)
        }
        self.docstrings = {node.value for node in ast.walk(self.tree) if isinstance(node, ast.Expr)}
        self.helpers: _Parameters = {
            name: tuple(arg.arg for arg in node.args.args if arg.arg != "self")
            for name, node in self.functions.items()
            if _makes_errors(node)
        }

    def sentences(self, helpers: _Parameters) -> Iterator[Sentence]:
        makers = {**helpers, **self.helpers}
        for scope, call in _calls(self.tree, ()):
            maker = _called(call)
            if maker in makers:
                for text in self._problems(call, makers[maker], scope):
                    yield Sentence(f"{self.name}:{call.lineno}", maker, text)
        yield from self._own_sentences()

    def _own_sentences(self) -> Iterator[Sentence]:
        """Those that an error's class makes of its fields."""
        for node in self.tree.body:
            if not isinstance(node, ast.ClassDef) or not hasattr(errors, node.name):
                continue
            for method in node.body:
                if isinstance(method, _Function) and method.name == "__str__":
                    for text in self._whole(_Choice(_returned(method), method), (method,)):
                        yield Sentence(f"{self.name}:{method.lineno}", node.name, text)

    def _problems(
        self, call: ast.Call, parameters: Sequence[str], scope: Sequence[_Function]
    ) -> Iterator[str]:
        arguments: list[ast.expr] = []
        for argument in call.args:
            arguments += self._spread(argument)
        named = [
            (parameters[n] if n < len(parameters) else "", value)
            for n, value in enumerate(arguments)
        ]
        named += [(word.arg or "", word.value) for word in call.keywords]
        for name, value in named:
            if name not in _ADVICE:
                yield from self._whole(value, scope)

    def _whole(self, node: ast.expr, scope: Sequence[_Function]) -> Iterator[str]:
        """The texts of `node` that are sentences, not names or numbers."""
        return (text for text in self._resolve(node, scope) if " " in text)

    def _spread(self, argument: ast.expr) -> list[ast.expr]:
        """`*helper(...)`: what the helper returns, problem first, then advice."""
        if not isinstance(argument, ast.Starred):
            return [argument]
        helper = self.functions[_called(argument.value)]
        problems = [pair.elts[0] for pair in _returned(helper) if isinstance(pair, ast.Tuple)]
        return [_Choice(problems, helper)]

    def _resolve(self, node: ast.expr, scope: Sequence[_Function]) -> list[str]:
        """Every text that `node` may be."""
        match node:
            case _Choice():
                return [t for one in node.choices for t in self._resolve(one, (node.scope,))]
            case ast.IfExp():
                return self._resolve(node.body, scope) + self._resolve(node.orelse, scope)
            case ast.BinOp(op=ast.Add()):
                pairs = product(self._resolve(node.left, scope), self._resolve(node.right, scope))
                return [left + right for left, right in pairs]
            case ast.Name():
                return self._assigned(node.id, scope)
            case ast.Call(func=ast.Name()):
                helper = self.functions.get(_called(node))
                if helper is not None and helper not in scope:
                    inner = (*scope, helper)
                    return [t for one in _returned(helper) for t in self._resolve(one, inner)]
        return _text(node) or [FILLED_IN]

    def _assigned(self, name: str, scope: Sequence[_Function]) -> list[str]:
        for statements in (*map(ast.walk, reversed(scope)), self.tree.body):
            values = [value for node in statements for value in _values(node, name)]
            if values:
                return [text for value in values for text in self._resolve(value, scope)]
        return [FILLED_IN]


class _Choice(ast.expr):
    """One of several expressions, in the scope of the function that they stand in."""

    def __init__(self, choices: list[ast.expr], scope: _Function) -> None:
        super().__init__()
        self.choices, self.scope = choices, scope


@cache
def _modules() -> tuple[_Module, ...]:
    return tuple(
        _Module(path) for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))
    )


def _helpers(modules: Sequence[_Module]) -> _Parameters:
    """What makes errors, and its parameters' names: classes, and functions that return one."""
    found: _Parameters = {}
    for module in modules:
        public = {n: p for n, p in module.helpers.items() if not n.startswith("_")}
        found |= public
    for kind in error_classes():
        names = tuple(inspect.signature(kind.__init__).parameters)[1:]
        found[kind.__name__] = names
    return found | _OTHERS


def _makes_errors(function: _Function) -> bool:
    if function.returns is None:
        return False
    returned = ast.unparse(function.returns).replace("|", " ").split()
    return "NoReturn" in returned or any(kind.__name__ in returned for kind in error_classes())


def _calls(
    node: ast.AST, scope: tuple[_Function, ...]
) -> Iterator[tuple[tuple[_Function, ...], ast.Call]]:
    if isinstance(node, _Function):
        scope = (*scope, node)
    if isinstance(node, ast.Call):
        yield scope, node
    for child in ast.iter_child_nodes(node):
        yield from _calls(child, scope)


def _called(node: ast.expr) -> str:
    if isinstance(node, ast.Call):
        node = node.func
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _returned(function: _Function) -> list[ast.expr]:
    found = (node.value for node in ast.walk(function) if isinstance(node, ast.Return))
    return [value for value in found if value is not None]


def _values(node: ast.AST, name: str) -> Iterator[ast.expr]:
    """What an assignment gives to `name`."""
    if not isinstance(node, ast.Assign):
        return
    for target in node.targets:
        pairs = [(target, node.value)]
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            pairs = list(zip(target.elts, node.value.elts, strict=True))
        yield from (value for at, value in pairs if isinstance(at, ast.Name) and at.id == name)


def _text(node: ast.AST) -> list[str]:
    """A literal's text, or nothing."""
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.JoinedStr():
            parts = [_text(part) or [FILLED_IN] for part in node.values]
            return ["".join(part[0] for part in parts)]
    return []
