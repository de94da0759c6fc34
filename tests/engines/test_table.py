"""Which engines there are: those of the library, those that packages register, and one's own class."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import prized_gym
from prized_gym import engines
from prized_gym.engines.inline import InlineEngine
from zoo.plain_driver import PlainDriver, engine_of


class OwnEngine(InlineEngine):
    """For an entry point, and to be passed."""

    name = "own"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution that registers engines, one of which is none."""
    info = tmp_path / "somebodys_engines-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: somebodys-engines\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[prized_gym.engines]\nsomebodys = somebodys_engines:Engine\nbroken = somebodys_engines:nothing\n"
    )
    (tmp_path / "somebodys_engines.py").write_text(
        "from prized_gym.engines.inline import InlineEngine\n"
        "class Engine(InlineEngine):\n    name = 'somebodys'\nnothing = 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "somebodys_engines", raising=False)


def test_a_class() -> None:
    assert engines.load(OwnEngine) is OwnEngine
    with prized_gym.Base("CartPole-v1", engine=OwnEngine) as base:
        assert base.engine == "own"
        envs = prized_gym.ForkedVectorEnv(base, num_envs=2, engine=OwnEngine)
        assert envs.reset(seed=0)[0].shape == (2, 4)
        envs.close()
    envs = prized_gym.ForkedVectorEnv("CartPole-v1", num_envs=1, engine=OwnEngine)
    assert envs.base.engine == "own"
    envs.close()
    with prized_gym.Base(engine=engine_of(PlainDriver()), progress=False) as base:
        assert base.exec("echo x").stdout == "x\n" and base.engine == "PlainDriver"


@pytest.mark.usefixtures("installed")
def test_an_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    assert engines.names()[:3] == ["inline", "local", "gvisor"] and "somebodys" in engines.names()
    envs = prized_gym.ForkedVectorEnv("CartPole-v1", num_envs=2, engine="somebodys")
    assert envs.base.engine == "somebodys" and envs.reset(seed=0)[0].shape == (2, 4)
    envs.close()
    monkeypatch.setenv("PRIZED_GYM_ENGINE", "somebodys")
    assert engines.load(None).name == "somebodys"
    with pytest.raises(TypeError, match=r"entry point broken = somebodys_engines:nothing .* must be a subclass"):
        engines.load("broken")


@pytest.mark.usefixtures("installed")
def test_an_unknown_name_is_told_all_names(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ValueError, match=r"unknown engine 'nowhere': the engines are inline, local, gvisor,.* somebodys"
    ):
        prized_gym.Base("CartPole-v1", engine="nowhere")
    monkeypatch.setenv("PRIZED_GYM_ENGINE", "nowhere")
    with pytest.raises(ValueError, match="from PRIZED_GYM_ENGINE"):
        engines.load(None)
    with pytest.raises(TypeError, match="subclass"):
        prized_gym.Base("CartPole-v1", engine=int)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="name of an engine"):
        prized_gym.Base("CartPole-v1", engine=3)  # type: ignore[arg-type]
