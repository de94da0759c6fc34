"""Classes and functions of a script, a notebook, ``python -c``: one identity in the trainer, the base and its copies."""

from __future__ import annotations

import json
import os
import shutil
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


def test_the_search_path_of_the_trainer_comes_before_every_package(tmp_path: Path) -> None:
    """Vendored dependencies, ours included: the base has the very ones that the trainer has."""
    import cloudpickle
    import farama_notifications

    for package in (cloudpickle, farama_notifications):
        place = Path(package.__file__).parent
        shutil.copytree(place, tmp_path / "vendored" / place.name)
    text = """
        import sys
        sys.path.insert(0, "vendored")
        import gymnasium as gym, json, numpy as np, prized_gym

        class Env(gym.Env):
            observation_space = gym.spaces.Box(-1, 1, (1,))
            action_space = gym.spaces.Discrete(2)
            def reset(self, *, seed=None, options=None):
                super().reset(seed=seed)
                loaded = [sys.modules[name].__file__ for name in ("cloudpickle", "farama_notifications", "prized_gym")]
                return np.zeros(1, np.float32), {"loaded": loaded}

        envs = prized_gym.ForkedVectorEnv(Env, 1)
        print("FOUND", json.dumps([list(envs.reset(seed=0)[1]["loaded"][0]), prized_gym.__file__]))
        envs.close()
    """
    (tmp_path / "trainer.py").write_text(textwrap.dedent(text))
    vendored, own = found_by(run(["trainer.py"], tmp_path))  # type: ignore[misc]
    assert vendored == [
        str(tmp_path / "vendored" / "cloudpickle" / "__init__.py"),
        str(tmp_path / "vendored" / "farama_notifications" / "__init__.py"),
        own,
    ]


def test_ids_registered_in_the_script_are_known_wherever_its_environments_run(tmp_path: Path) -> None:
    """Inside other registered environments, in ``warm_up`` and ``on_fork``, in a reset; with and without a version."""
    (tmp_path / "registers.py").write_text(
        "import gymnasium as gym\ngym.register('inner/Imported-v0', entry_point='gymnasium.envs.classic_control:CartPoleEnv')\n"
    )
    text = """
        import warnings
        warnings.simplefilter("error")
        import gymnasium as gym, json, threading, prized_gym, registers
        from gymnasium.envs.classic_control import CartPoleEnv

        class Inner(CartPoleEnv):
            pass

        class Outer(gym.Wrapper):
            def __init__(self):
                import registers
                self.found = ["outer"]
                super().__init__(gym.make("inner/Inner-v0"))
            def reset(self, *, seed=None, options=None):
                assert isinstance(gym.make("inner/Inner").unwrapped, Inner)
                gym.make("inner/Imported-v0")
                try:
                    gym.make("inner/Unsendable-v0")
                except gym.error.Error as error:
                    said = str(error)
                names = [type(env.unwrapped).__name__ for env in (self, gym.make("CartPole-v1"))]
                observation, _ = super().reset(seed=seed)
                return observation, {"found": [*self.found, *names], "said": said}

        gym.register("inner/Inner-v0", Inner)
        gym.register("inner/Outer-v0", Outer)
        gym.register("inner/Unsendable-v0", CartPoleEnv, kwargs={"lock": threading.Lock()})
        warnings.simplefilter("ignore")
        gym.register("CartPole-v1", Inner)
        warnings.simplefilter("error")

        def warm_up(env):
            env.get_wrapper_attr("found").append(gym.spec("inner/Inner-v0").id)

        def on_fork(env, index, seed):
            env.get_wrapper_attr("found").append(gym.make("inner/Inner-v0").spec.id)

        found = []
        for env in ("inner/Outer-v0", Outer):
            envs = prized_gym.ForkedVectorEnv(env, 1, warm_up=warm_up, on_fork=on_fork)
            infos = envs.reset(seed=0)[1]
            found.append([list(infos["found"][0]), infos["said"][0]])
            envs.close()
        print("FOUND", json.dumps(found))
    """
    (tmp_path / "trainer.py").write_text(textwrap.dedent(text))
    result = run(["trainer.py"], tmp_path)
    for names, said in found_by(result):  # type: ignore[attr-defined]
        assert names == ["outer", "inner/Inner-v0", "inner/Inner-v0", "Inner", "Inner"]
        assert "'inner/Unsendable-v0', registered in the script, cannot be sent here: TypeError: cannot pickle" in said
    assert "Overriding environment inner/Imported" not in result.stderr
