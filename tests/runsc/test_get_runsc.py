"""Where scripts/get_runsc.py looks for a runsc."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tools.sandboxes import ROOT


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("get_runsc", ROOT / "scripts" / "get_runsc.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def apt(tmp_path: Path) -> Path:
    (tmp_path / "sources.list.d").mkdir()
    return tmp_path


def test_deb822_source(script: ModuleType, apt: Path) -> None:
    (apt / "sources.list.d" / "other.sources").write_text("Types: deb\nURIs: mirror://other\nSuites: nodistro\n")
    (apt / "sources.list.d" / "debian.sources").write_text(
        "Types: deb\nEnabled: no\nURIs: mirror://off\nSuites: bookworm\n\n"
        "# a comment\nTypes: deb deb-src\nURIs: mirror://main\nSuites: bookworm bookworm-updates\nComponents: main\n"
        "Signed-By:\n -----BEGIN\n .\n text\n\n"
        "Types: deb\nURIs: mirror://security\nSuites: bookworm-security\n"
    )
    (apt / "sources.list.d" / "ignored.sources.off").write_text("Types: deb\nURIs: mirror://no\nSuites: bookworm\n")
    assert script.source_for("trixie", "bookworm", script.stanzas(apt)) == (
        "Types: deb\nSuites: trixie\nComponents: main\nURIs: mirror://main\nSigned-By: \n -----BEGIN\n .\n text\n"
    )


def test_one_line_source_of_the_good_suite_itself(script: ModuleType, apt: Path) -> None:
    (apt / "sources.list").write_text(
        "# deb mirror://comment trixie main\ndeb-src mirror://source trixie main\n"
        "deb [arch=amd64 signed-by=/keys/debian.gpg] mirror://main trixie main contrib # here\n"
    )
    assert script.source_for("trixie", "trixie", script.stanzas(apt)) == (
        "Types: deb\nSuites: trixie\nComponents: main\nURIs: mirror://main\nSigned-By: /keys/debian.gpg\n"
    )


def test_rolling_suite_names(script: ModuleType, apt: Path) -> None:
    (apt / "sources.list").write_text("deb mirror://main unstable main\n")
    assert "mirror://main" in script.source_for("trixie", "", script.stanzas(apt))


def test_another_system_is_told(script: ModuleType, apt: Path) -> None:
    (apt / "sources.list").write_text("deb mirror://main noble main\n")
    with pytest.raises(script.Failed, match="set RUNSC"):
        script.source_for("trixie", "plucky", script.stanzas(apt))


def test_a_runsc_that_is_there_is_not_fetched_again(tmp_path: Path) -> None:
    for name in ("runsc", "slirp4netns"):
        (tmp_path / name).write_text("#!/bin/sh\necho runsc version 1\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "get_runsc.py", tmp_path], capture_output=True, text=True, timeout=20,
        env={**os.environ, "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.stdout == f"{tmp_path / 'runsc'}\n" and done.returncode == 0, done.stderr
