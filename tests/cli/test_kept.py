"""``prized-gym ls``, ``rm`` and ``sweep``, with sandboxes that were kept and with engines that cannot be asked."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from prized_gym import cli, engines
from prized_gym.cli import kept as kept_commands
from prized_gym.errors import EngineUnavailableError, SandboxError
from prized_gym.interface.engine import BaseHandle, Engine
from prized_gym.interface.sandbox import KeptBase
from prized_gym.recipe import Recipe
from prized_gym.runsc import Runsc, Sandbox, delete_kept, list_kept
from prized_gym.runsc.store import new_id, write_kept


@pytest.fixture
def keep(runsc: Runsc) -> Iterator[Callable[..., str]]:
    """Keeps a sandbox; what the test leaves of it is deleted."""
    ids: list[str] = []

    def keeping(seconds: float | None = 86400.0, **labels: str) -> str:
        made = Sandbox.create(runsc=runsc, vcpu=1, memory_gb=0.25, disk_gb=0.05, max_runtime_min=5, labels=labels)
        with made:
            ids.append(made.keep(seconds))
        return ids[-1]

    yield keeping
    for id in ids:
        delete_kept(id)


def test_what_is_kept_is_listed_and_deleted(keep: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    one, two = keep(task="first"), keep(None)
    assert cli.main(["ls"]) == 0
    head, *rows, last = capsys.readouterr().out.splitlines()
    assert head.split() == ["ID", "ENGINE", "SIZE", "AGE", "EXPIRES", "LABELS"]
    assert re.fullmatch(rf"{one}  gvisor  \d[\d.]* MB  \d+ s +in 24 h  task=first", rows[0]), rows
    assert re.fullmatch(rf"{two}  gvisor  \d[\d.]* MB  \d+ s +never", rows[1]), rows
    assert re.fullmatch(r"2 kept, \d+(\.\d+)? MB", last)

    assert cli.main(["ls", "--json", "--engine", "gvisor"]) == 0
    fields = json.loads(capsys.readouterr().out)
    stored = {each.id: each for each in list_kept()}
    assert [each["id"] for each in fields] == [one, two]
    assert fields[0] == {
        "id": one,
        "engine": "gvisor",
        "labels": {"task": "first"},
        "size": stored[one].size,
        "created": stored[one].kept_at,
        "expires": stored[one].expires_at,
    }
    assert fields[1]["expires"] is None

    # All are tried, whichever is not there.
    assert cli.main(["rm", one, "sbx_000000000000", "nonsense", two]) == 1
    captured = capsys.readouterr()
    assert re.fullmatch(rf"deleted {one} \([\d.]+ MB, \d+ s old\)\ndeleted {two} \(.*\)\n", captured.out)
    assert "no base sbx_000000000000 is kept" in captured.err and "no base nonsense is kept" in captured.err
    assert not list_kept()
    assert cli.main(["ls"]) == 0
    assert capsys.readouterr().out == "nothing is kept\n"


def test_a_sweep_deletes_what_has_expired_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], store: Path
) -> None:
    ids = []
    for expires_at in (time.time() - 1, time.time() + 3600):
        for name in ("image", "root"):
            (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / "image" / "pages").write_bytes(b"1" * 5_000_000)
        description = {"labels": {}, "created_at": 1.0, "kept_at": time.time() - 3 * 86400}
        ids.append(new_id())
        write_kept(ids[-1], tmp_path / "image", tmp_path / "root", description, expires_at)
    try:
        assert cli.main(["ls", "--engine", "gvisor"]) == 0
        assert re.search(rf"{ids[0]}  gvisor  5(\.\d+)? MB  3 d  expired", capsys.readouterr().out)
        assert cli.main(["sweep", "--engine", "gvisor"]) == 0
        assert re.fullmatch(rf"deleted {ids[0]} \(5(\.\d+)? MB, 3 d old\)\n", capsys.readouterr().out)
        assert [each.id for each in list_kept()] == ids[1:]
        assert cli.main(["sweep", "--json", "--engine", "gvisor"]) == 0
        assert json.loads(capsys.readouterr().out) == []
        assert cli.main(["sweep", "--engine", "gvisor"]) == 0
        assert capsys.readouterr().out == "nothing was deleted\n"
    finally:
        for id in ids:
            delete_kept(id)


class FarEngine(Engine):
    """An engine of another machine, which cannot always be asked."""

    name = "far"
    trouble: Exception | None = None
    bases: dict[str, KeptBase] = {}

    @classmethod
    def check(cls) -> None:
        if cls.trouble is not None:
            raise cls.trouble

    @classmethod
    def build(cls, recipe: Recipe, options: Any, timeout: float | None, progress: bool) -> BaseHandle:
        raise NotImplementedError

    @classmethod
    def kept(cls) -> list[KeptBase]:
        cls.check()
        return list(cls.bases.values())

    @classmethod
    def remove(cls, id: str) -> bool:
        cls.check()
        return cls.bases.pop(id, None) is not None


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FarEngine]]:
    monkeypatch.setitem(engines.ENGINES, "far", f"{__name__}:FarEngine")
    FarEngine.bases = {"far-1": KeptBase("far-1", "far")}
    FarEngine.trouble = None
    yield FarEngine
    FarEngine.trouble = None


def test_an_engine_that_tells_little(far: type[FarEngine], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ls", "--engine", "far"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["far-1", "far", "?", "?", "never"]
    assert cli.main(["ls", "--json", "--engine", "far"]) == 0
    [fields] = json.loads(capsys.readouterr().out)
    assert fields["size"] is None and fields["created"] is None and fields["expires"] is None
    assert cli.main(["rm", "far-1", "far-1"]) == 0
    assert capsys.readouterr().out == "deleted far-1\n" and not far.bases


def test_what_cannot_be_shown_hides_nothing_else(far: type[FarEngine], capsys: pytest.CaptureFixture[str]) -> None:
    broken: Any = None
    far.bases["two"] = KeptBase("two", "far", created=broken)
    far.bases["three"] = KeptBase("three", "far", labels={"task\x1b[31m": "a\nfar-4"})
    far.bases["four"] = KeptBase("four", "far", labels=broken)
    assert cli.main(["ls", "--engine", "far"]) == 1
    captured = capsys.readouterr()
    assert [line.split()[0] for line in captured.out.splitlines()] == ["ID", "far-1", "three", "2"]
    assert r"task\x1b[31m=a\nfar-4" in captured.out and "\x1b" not in captured.out
    assert captured.err.count("prized-gym: far: ") == 2
    assert cli.main(["rm", "--engine", "far", "two"]) == 1 and "two" not in far.bases


def test_an_engine_that_cannot_be_asked_is_named(far: type[FarEngine], capsys: pytest.CaptureFixture[str]) -> None:
    far.trouble = EngineUnavailableError("FAR_API_KEY is not set\nget one")
    assert cli.main(["ls"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "nothing is kept\n"
    assert captured.err == "prized-gym: far is passed over: FAR_API_KEY is not set\n"
    assert cli.main(["ls", "--engine", "far"]) == 1
    far.trouble = SandboxError("no route to far")
    assert cli.main(["ls"]) == 1
    assert "prized-gym: far: no route to far" in capsys.readouterr().err
    far.trouble = ImportError("cannot import name")  # an engine of a package that does not fit
    assert cli.main(["ls"]) == 1
    assert "prized-gym: far: ImportError: cannot import name" in capsys.readouterr().err
    assert cli.main(["sweep", "--engine", "nowhere"]) == 1
    assert "unknown engine 'nowhere'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (123_456_789, "123 MB"), (999_600_000, "1 GB"), (5e12, "5 TB")],
)
def test_sizes(count: int, text: str) -> None:
    assert kept_commands._size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(-1, "0 s"), (119, "119 s"), (3600, "60 min"), (90_000, "25 h"), (200_000, "2 d")]
)
def test_ages(seconds: float, text: str) -> None:
    assert kept_commands._age(seconds) == text
