"""The source of classes and functions that no module file holds, such as those of a notebook cell, as a digest.

Two versions of a scorer must not share a record. The digest covers the source of the class, of its bases, and of every
function, class and value that its code names, as far as they are the user's own.
"""

from __future__ import annotations

import ast
import dis
import hashlib
import inspect
import linecache
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name
from types import CodeType, FunctionType, ModuleType
from typing import Any

from harness.errors import UserError
from harness.files.digests import digest

OURS = ("harness.", "tasks.")


def in_a_file(found: Any) -> bool:
    """Whether a class or function is one that its module's own file gives back, so that the file can be hashed instead."""
    if found.__module__ == "__main__" or _file(found.__module__) is None:
        return False
    try:
        return resolve_name(f"{found.__module__}:{found.__qualname__}") is found
    except (AttributeError, ImportError, ValueError):  # a class that a function made
        return False


def source_digest(found: Any) -> str:
    """SHA-256 of the source of a class or function and of what it is made of.

    Raises:
        UserError: there is no source to read, or its code names a value that has no content to hash.
    """
    texts: dict[str, Any] = {}
    try:
        _collect(found, texts)
    except RecursionError:
        raise UserError(
            f"{found.__qualname__} names a value that holds itself (a logger, a register of functions): it cannot be hashed; "
            "write the class into a file of its own and import it from there"
        ) from None
    return digest(texts)


def _collect(found: Any, texts: dict[str, Any]) -> None:
    name = f"{found.__module__}.{found.__qualname__}"
    if name in texts or _installed(found.__module__):
        return
    if in_a_file(found):
        file = _file(found.__module__)
        texts[name] = "" if file is None else hashlib.sha256(file.read_bytes()).hexdigest()
        return
    texts[name] = _source(found)
    if isinstance(found, type):
        for base in found.__mro__[1:]:
            _collect(base, texts)
        for key, value in vars(found).items():
            if not key.startswith(("__", "_abc_")) and not _functions(value):
                _content(value, f"{name}.{key}", texts)
    for function in _functions(found):
        for key, value in _named_by(function):
            _content(value, f"{name} -> {key}", texts)


def _content(value: Any, name: str, texts: dict[str, Any]) -> None:
    """Take in what a name in the code stands for: more code, or a value."""
    from harness.configure.objects import described  # an object's fields may again be of classes without a file

    if isinstance(value, ModuleType):
        file = _file(value.__name__)
        texts[name] = hashlib.sha256(file.read_bytes()).hexdigest() if file and not _installed(value.__name__) else ""
    elif isinstance(value, type | FunctionType):
        _collect(value, texts)
    elif not callable(value) or hasattr(value, "__dict__"):
        texts[name] = described(value, name)


def _named_by(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Global names and variables of enclosing functions that a function reads, and its defaults."""
    for key in sorted(set(_globals_of(function.__code__))):
        if key in function.__globals__:
            yield key, function.__globals__[key]
    for key, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if key != "__class__":
            yield key, cell.cell_contents
    yield "defaults", [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]


def _globals_of(code: CodeType) -> Iterator[str]:
    yield from (one.argval for one in dis.get_instructions(code) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _globals_of(inner)


def _functions(found: Any) -> list[FunctionType]:
    """Functions that a class, a method of any kind or a function consists of, as far as their source can be read."""
    return [one for one in _written(found) if linecache.getlines(one.__code__.co_filename)]


def _written(found: Any) -> list[FunctionType]:
    """The same whether or not there is source, but for what decorators wrote."""
    if isinstance(found, type):
        return [one for value in vars(found).values() for one in _written(value)]
    inner = [getattr(found, name, None) for name in ("fget", "fset", "func", "__func__", "__wrapped__")]
    every = [one for one in (found, *inner) if isinstance(one, FunctionType)]
    return [one for one in every if not _by_decorator(one)]


def _by_decorator(function: FunctionType) -> bool:
    """Whether a decorator made a function: from a text of its own, as dataclass does, or in a module that is installed."""
    return function.__code__.co_filename == "<string>" or _installed(str(function.__globals__.get("__name__")))


def _source(found: Any) -> str:
    """The text of a class or function; of a class from where its methods stand, for a notebook's cells are no module files."""
    if isinstance(found, type) and not _written(found):
        return ""  # its bases and attributes, which are taken in beside its source, are all there is to it
    for function in _functions(found) if isinstance(found, type) else ():
        text = _class_around(found.__name__, function.__code__)
        if text:
            return text
    try:
        return inspect.getsource(found)
    except (OSError, TypeError):
        raise UserError(
            f"{found.__qualname__} has no source that can be read, so records of two versions of it could not be told apart: "
            "write it into a file of its own and import it from there"
        ) from None


def _class_around(name: str, code: CodeType) -> str:
    """The class of this name that holds a method, with its decorators; empty where its file or cell has none."""
    lines = linecache.getlines(code.co_filename)
    try:
        tree = ast.parse("".join(lines))
    except SyntaxError:  # a cell with commands of the notebook's own
        return ""
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name == name and node.lineno <= code.co_firstlineno <= (node.end_lineno or 0)
    ]
    if not around:
        return ""
    node = max(around, key=lambda one: one.lineno)
    first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
    return "".join(lines[first - 1 : node.end_lineno])


def _file(module: str) -> Path | None:
    """The file of a loaded module."""
    name = getattr(sys.modules.get(module), "__file__", None)
    return Path(name) if name and Path(name).is_file() else None


def _installed(module: str) -> bool:
    """Whether a module is this project's, Python's or an installed package's: records name their versions or hash them."""
    if module == "__main__" or f"{module}.".startswith(OURS):
        return module != "__main__"  # whatever program runs there, what a user defines in it is the user's
    file = _file(module)
    if file is None:
        return module in sys.builtin_module_names or module == "builtins"
    return "site-packages" in file.parts or file.is_relative_to(sysconfig.get_paths()["stdlib"])
