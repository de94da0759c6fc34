"""Classes and functions of a script, a notebook, ``python -c``: one identity in the trainer, the base and its copies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SCRIPT = '''
import dataclasses, enum, json, pickle, sys, types
import gymnasium as gym
import numpy as np
import prized_gym


@dataclasses.dataclass
class Task:
    n: int = 3

    @dataclasses.dataclass
    class Part:
        m: int = 1


class Colour(enum.Enum):
    RED = 1


class OutOfPaint(Exception):
    pass


def double(task):
    return Task(2 * task.n)


class Env(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (1,))
    action_space = gym.spaces.Discrete(3)
    task, made = None, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.options = options or {}
        own = [Task(7), Task.Part(4), Colour.RED, double]
        kept = pickle.loads(pickle.dumps([*own, *self.options.values()]))
        assert type(kept[0]) is Task and type(kept[1]) is Task.Part and kept[2] is Colour.RED and kept[3] is double
        return np.zeros(1, np.float32), {"task": Task(9), "options": types.SimpleNamespace(**self.options)}

    def step(self, action):
        if action == 1:
            raise OutOfPaint("red")
        return np.zeros(1, np.float32), 0.0, action == 2, False, {"part": Task.Part(int(action))}

    def give(self, task):
        Env.made += 1
        assert type(task) is Task, type(task)
        return pickle.loads(pickle.dumps(task)), Env.made

    def apply(self, function):
        return pickle.loads(pickle.dumps(function))(Task(4))


class Late:
    """Nothing of the environment refers to it."""

    class Inner:
        value = 5


def main():
    found = {}
    envs = prized_gym.ForkedVectorEnv(Env, 2)
    infos = envs.reset(seed=0, options={"task": Task(5), "late": Late.Inner(), "type": Late})[1]
    found["options"] = [type(got.late) is Late.Inner and got.type is Late for got in infos["options"]]
    found["infos"] = [type(task) is Task and task.n for task in infos["task"]]
    found["call"] = [(type(task) is Task and task.n, made) for task, made in envs.call("give", Task(4))]
    # What an earlier call changed in the class of the copy has stayed.
    found["again"] = [(type(task) is Task and task.n, made) for task, made in envs.call("give", Task(6))]
    envs.set_attr("task", [Task(1), Colour.RED])
    found["attr"] = [task == expected for task, expected in zip(envs.get_attr("task"), [Task(1), Colour.RED])]
    envs.reset(seed=1)
    found["replayed"] = [task == expected for task, expected in zip(envs.get_attr("task"), [Task(1), Colour.RED])]
    found["function"] = [task.n for task in envs.call("apply", double)]
    found["step"] = [type(part) is Task.Part and part.m for part in envs.step([0, 2])[-1]["part"]]
    envs.branch(0, [1])
    found["branched"] = [type(task) is Task and task.n for task, _ in envs.call("give", Task(8))]
    try:
        envs.step([1, 1])
    except OutOfPaint as error:
        found["raised"] = str(error)
    envs.close()
    found["trainer"] = Env.made
    base = prized_gym.Base(Env)
    runs = prized_gym.rollouts(base, policy=lambda o, i: 2, tasks=[Task(1), Task(2)], copies=2, progress=False)
    found["rollouts"] = sorted((run.failure, run.task.n) for run in runs)
    base.close()
    print("FOUND", json.dumps(found), flush=True)


'''

EXPECTED = {
    "options": [True, True],
    "infos": [9, 9],
    "call": [[4, 1], [4, 1]],
    "again": [[6, 2], [6, 2]],
    "attr": [True, True],
    "replayed": [True, True],
    "function": [8, 8],
    "step": [0, 2],
    "branched": [8, 8],
    "raised": "red",
    "trainer": 0,
    "rollouts": [[None, 1], [None, 2]],
}


def run(command: list[str], directory: Path, text: str | None = None) -> subprocess.CompletedProcess[str]:
    root = str(Path(__file__).parents[2])
    return subprocess.run(
        [sys.executable, *command],
        cwd=directory,
        input=text,
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": root},
    )


def found_by(result: subprocess.CompletedProcess[str]) -> object:
    assert "FOUND" in result.stdout, result.stderr
    return json.loads(result.stdout.split("FOUND ")[1].splitlines()[0])


@pytest.mark.parametrize("way", ["script", "command", "module", "stdin", "spawned"])
def test_objects_of_a_script_reach_copies_and_come_back(way: str, tmp_path: Path) -> None:
    # Without a guard, which nothing needs; a child that multiprocessing spawns needs one for itself.
    text = SCRIPT + (
        "main()"
        if way != "spawned"
        else "if __name__ == '__main__':\n"
        "    import multiprocessing\n"
        "    child = multiprocessing.get_context('spawn').Process(target=main)\n"
        "    child.start(); child.join(); assert child.exitcode == 0\n"
    )
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "trainer.py").write_text(text)
    command = {
        "script": ["package/trainer.py"],
        "spawned": ["package/trainer.py"],
        "command": ["-c", text],
        "module": ["-m", "package.trainer"],
        "stdin": ["-"],
    }[way]
    assert found_by(run(command, tmp_path, text if way == "stdin" else None)) == EXPECTED


def test_a_cell_that_is_run_again(tmp_path: Path) -> None:
    """The base goes on with the classes it was built with; objects of the new ones reach it all the same."""
    result = run(
        ["-"],
        tmp_path,
        SCRIPT
        + textwrap.dedent(
            """
            envs = prized_gym.ForkedVectorEnv(Env, 1)
            envs.reset(seed=0)
            Before = Task

            @dataclasses.dataclass
            class Task:
                n: int = 3
                more: str = "new"

            envs.set_attr("task", Task(5, "than before"))
            (task,) = envs.get_attr("task")
            assert type(task) is Task and type(envs.reset(seed=0)[1]["task"][0]) is Task
            print("FOUND", json.dumps(task.more))
            envs.close()
            """
        ),
    )
    assert found_by(result) == "than before"


def test_a_script_that_a_worker_of_multiprocessing_imports_sets_up_no_base(tmp_path: Path) -> None:
    """A worker of the environment's own imports the script, as every spawned child does: without a guard, for ever."""
    text = SCRIPT + textwrap.dedent(
        """
        import multiprocessing

        class Spawning(Env):
            def __init__(self):
                child = multiprocessing.get_context("spawn").Process(target=print, args=("from the worker",))
                child.start()
                child.join(100)
                assert child.exitcode == 1, child.exitcode

        envs = prized_gym.ForkedVectorEnv(Spawning, 1)
        envs.reset(seed=0)
        envs.close()
        print("FOUND", json.dumps("end"))
        """
    )
    (tmp_path / "trainer.py").write_text(text)
    result = run(["trainer.py"], tmp_path)
    assert found_by(result) == "end"
    assert 'if __name__ == "__main__"' in result.stderr
