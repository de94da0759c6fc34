"""Pickles of what other processes cannot import: the classes and functions of a script or a notebook, by value.

A process that runs environments never runs the user's script. It gets each class and function of ``__main__`` with the
first pickle that refers to it, and keeps it under its name in a module ``__main__`` of its own. So there is one identity on
each side: what the environment uses is what ``__main__.Task`` is there, and pickles by reference of either side are read by
the other.

``multiprocessing`` runs the script once more instead. That would ask for an ``if __name__ == "__main__"`` in every script, is
impossible for a notebook, for ``python -c`` and for a script read from stdin, and takes as long as everything the script
imports: 1.3 s where that is torch, against 1 ms for a dozen classes by value, and 20 us for an object whose class has arrived
before (measured).
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import io
import sys
import types
import uuid
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle

_MAIN_NAMES = ("__main__", "__mp_main__")
"""What the module of a script is called; the second in a child that ``multiprocessing`` has spawned."""

_main: types.ModuleType | None = None
"""The module ``__main__`` that definitions are kept in, in a process that does not run the user's script."""


class _Definitions:
    """Which class or function is which, on both sides."""

    def __init__(self) -> None:
        self._keys: dict[int, tuple[weakref.ref[Any], str]] = {}
        self._objects: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
        self._complete: set[str] = set()

    def key(self, obj: Any) -> str:
        """The key of ``obj``, one of this process's own if it has none yet."""
        known = self._keys.get(id(obj))
        if known is not None and known[0]() is obj:
            return known[1]
        key = uuid.uuid4().hex
        self.add(key, obj)
        self._complete.add(key)
        return key

    def add(self, key: str, obj: Any) -> None:
        place = id(obj)

        def forget(reference: weakref.ref[Any]) -> None:
            if self._keys.get(place, (None,))[0] is reference:
                del self._keys[place]
                self._complete.discard(key)

        self._keys[place] = (weakref.ref(obj, forget), key)
        self._objects[key] = obj

    def find(self, key: str) -> Any:
        return self._objects.get(key)

    def complete(self, obj: Any) -> bool:
        """Whether ``obj`` was given its attributes before; it counts as complete from here on."""
        key = self.key(obj)
        if key in self._complete:
            return True
        self._complete.add(key)
        return False

    def incomplete(self, obj: Any) -> None:
        self._complete.discard(self.key(obj))


_DEFINITIONS = _Definitions()


def dumps(obj: Any, known: set[str] | None = None) -> bytes:
    """Pickle ``obj`` by value where its reader could not import it; ``pickle.loads`` reads it.

    Args:
        obj: what to pickle.
        known: the keys of the definitions that the reader has; those sent with this pickle are added. None: it has none.
    """
    with io.BytesIO() as file, _scripts_by_value():
        pickler = _Pickler(file, known or ())
        pickler.dump(obj)
        if known is not None:
            known |= pickler.sent
        return file.getvalue()


def concerns(pickled: bytes) -> bool:
    """Whether a pickle by reference may refer to something that other processes cannot import."""
    # Both names of the script's module end so.
    return b"_main__" in pickled or any(
        name.encode() in pickled for name in cloudpickle.list_registry_pickle_by_value()
    )


def describe_main() -> dict[str, Any]:
    """What :func:`install_main` of another process is to know of this process's ``__main__``."""
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    file = getattr(main, "__file__", None)
    return {
        "file": file if isinstance(file, str) else None,
        "spec": getattr(spec, "name", None),
        "package": getattr(main, "__package__", None),
        "names": [name for name in _MAIN_NAMES if name in sys.modules],
    }


def install_main(described: dict[str, Any] | None = None) -> None:
    """Give this process, which does not run the user's script, a module ``__main__`` for the definitions that come.

    Args:
        described: what :func:`describe_main` gave in the process that runs it; None where its files are not to be found.
    """
    global _main
    described = described or {"file": None, "spec": None, "package": None, "names": _MAIN_NAMES}
    main = types.ModuleType("__main__")
    main.__package__ = described["package"]
    if described["file"] is not None:
        main.__file__ = described["file"]
    if described["spec"] is not None:
        # What a worker that the environment starts by itself, with multiprocessing, imports.
        main.__spec__ = importlib.machinery.ModuleSpec(described["spec"], None, origin=described["file"])
    for name in described["names"]:
        sys.modules[name] = main
    _main = main


@contextlib.contextmanager
def _scripts_by_value() -> Iterator[None]:
    """In a child that ``multiprocessing`` has spawned, the script is a module like others, which nobody can import."""
    script = sys.modules.get("__mp_main__")
    if script is None or script.__name__ != "__mp_main__" or _registered(script):
        yield
        return
    cloudpickle.register_pickle_by_value(script)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(script)


def _registered(module: types.ModuleType) -> bool:
    return module.__name__ in cloudpickle.list_registry_pickle_by_value()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Gives definitions keys, so that their reader has each once."""

    def __init__(self, file: io.BytesIO, known: Any) -> None:
        super().__init__(file, protocol=5)
        self._known = known
        self.sent: set[str] = set()

    def reducer_override(self, obj: Any) -> Any:
        reduced = super().reducer_override(obj)
        if not isinstance(reduced, tuple) or len(reduced) != 6:
            return reduced
        name = _name_in_main(obj)
        if name is None and not isinstance(obj, type):
            # A lambda, say: another one each time.
            return reduced
        key = _DEFINITIONS.key(obj)
        if name is not None:
            if key in self._known:
                return _find, (key,)
            self.sent.add(key)
        make, args, state, _, _, complete = reduced
        return (
            _define,
            (key, name, make, args),
            (complete, state, obj.__qualname__, _holder(obj, name)),
            None,
            None,
            _complete,
        )


def _name_in_main(obj: Any) -> str | None:
    """The qualified name under which ``obj`` is found in the script's module, or None."""
    module, name = getattr(obj, "__module__", None), getattr(obj, "__qualname__", None)
    if module not in _MAIN_NAMES or not isinstance(name, str):
        return None
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return name if found is obj else None


def _holder(obj: Any, name: str | None) -> Any:
    """What a nested class is found through."""
    return None if name is None or "." not in name else getattr(sys.modules[obj.__module__], name.split(".")[0])


def _define(key: str, name: str | None, make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Return the definition with this key: the one there is, else one that is made and has no attributes yet."""
    found = _DEFINITIONS.find(key)
    if found is None:
        found = make(*args)
        _DEFINITIONS.add(key, found)
        if _main is not None and name is not None:
            _keep(_main, key, name, found)
    return found


def _keep(main: types.ModuleType, key: str, name: str, definition: Any) -> None:
    # A cell that was run again defines its classes anew; the environment, which was there first, goes on with its own.
    if "." not in name:
        main.__dict__.setdefault(name, definition)
    # A later pickle refers to it by its key.
    main.__dict__.setdefault("__prized_gym_definitions__", {})[key] = definition


def _complete(definition: Any, state: tuple[Callable[[Any, Any], None], Any, str, Any]) -> None:
    """Give a definition its attributes, once: what it has got here since then is not undone by the next pickle of it."""
    give, attributes, name, _ = state
    if _DEFINITIONS.complete(definition):
        return
    try:
        give(definition, attributes)
        definition.__qualname__ = name
    except BaseException:
        _DEFINITIONS.incomplete(definition)
        raise


def _find(key: str) -> Any:
    found = _DEFINITIONS.find(key)
    if found is None:
        raise LookupError(f"definition {key} has not arrived here")
    return found
