"""What the linters cannot say of the code: what overrides nothing is documented, errors are one tree, files are small."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import prized_gym

PACKAGE = Path(prized_gym.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))


def modules() -> Iterator[ModuleType]:
    """All modules of the package, but those that need a library which is not here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for found in pkgutil.walk_packages(prized_gym.__path__, "prized_gym."):
            if not found.name.endswith("__main__"):
                try:
                    yield importlib.import_module(found.name)
                except ImportError:
                    assert found.name.startswith("prized_gym.integrations."), found.name


def undocumented(cls: type) -> Iterator[str]:
    """The public methods and properties that a class adds to its bases without a word."""
    for name, value in vars(cls).items():
        function: Any = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if (
            inspect.isfunction(function)
            and not name.startswith("_")
            and not any(name in vars(base) or name in inspect.get_annotations(base) for base in cls.__mro__[1:])
            and not function.__doc__
        ):
            yield f"{cls.__module__}.{cls.__qualname__}.{name}"


def test_every_public_method_that_overrides_nothing_is_documented() -> None:
    found = [
        line
        for module in modules()
        for name, cls in vars(module).items()
        if inspect.isclass(cls) and cls.__module__ == module.__name__ and not name.startswith("_")
        for line in undocumented(cls)
    ]
    assert not found, "\n".join(found)


def test_every_exception_class_is_a_prized_gym_error() -> None:
    found = {
        f"{module.__name__}.{name}": issubclass(value, prized_gym.PrizedGymError)
        for module in modules()
        for name, value in vars(module).items()
        if inspect.isclass(value) and value.__module__ == module.__name__ and not name.startswith("_")
        if issubclass(value, BaseException)
    }
    assert {"prized_gym.errors.SetupError", "prized_gym.wire.errors.ProtocolError"} <= found.keys()
    # The agent runs inside a sandbox, on a bare interpreter: this library is not there. On the host, what it breaks of the
    # protocol becomes a RunscError.
    assert {name for name, ours in found.items() if not ours} == {"prized_gym.runsc.agent.frames.BadFrame"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_file_or_class_is_too_large(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 500
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            methods = [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
            lines = (node.end_lineno or 0) - node.lineno + 1
            assert lines <= 400, f"{node.name} has {lines} lines"
            assert len(methods) <= 30, f"{node.name} has {len(methods)} methods"
