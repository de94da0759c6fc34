"""A coding benchmark whose programs may do what they like: each runs in a live fork of one sandbox.

    pip install prized-gym
    python examples/code_eval.py

Needs Linux and gVisor's runsc (`prized-gym doctor gvisor`); takes some twenty seconds.

The "model" is a list of programs for each task: right ones, wrong ones, and nasty ones that delete all they can, fork without
end, loop for ever or leave early as if all were well. A rollout writes a program into a fresh copy and runs the tests there,
for a reward of 1 or 0. A program that fails, hangs or takes its copy down is worth 0; a rollout only fails if the benchmark
itself does.
"""

import argparse
import json
import sys
from textwrap import dedent

import prized_gym

# A fork bomb, an endless loop and a gigabyte of memory are among these. A sandbox has at most 1024 processes, no network, and
# the memory and share of the processors that its base was given: what they use up is their own copy's. (Without root there is
# no limit of memory, so that program stops at a gigabyte.)
TASKS = [
    {
        "prompt": "fibonacci(n): the n-th Fibonacci number; fibonacci(0) is 0 and fibonacci(1) is 1.",
        "tests": {"fibonacci(0)": 0, "fibonacci(1)": 1, "fibonacci(30)": 832040},
        "programs": {
            "a loop": """
                def fibonacci(n):
                    a, b = 0, 1
                    for _ in range(n):
                        a, b = b, a + b
                    return a
            """,
            "recursive": """
                def fibonacci(n):
                    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)
            """,
            "off by one": """
                def fibonacci(n):
                    return 1 if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)
            """,
            "never returns": """
                def fibonacci(n):
                    while True:
                        n += 1
            """,
        },
    },
    {
        "prompt": "is_palindrome(text): whether its letters read the same backwards, whatever their case.",
        "tests": {"is_palindrome('Never odd or even')": True, "is_palindrome('abc')": False, "is_palindrome('')": True},
        "programs": {
            "right": """
                def is_palindrome(text):
                    letters = [letter for letter in text.lower() if letter.isalpha()]
                    return letters == letters[::-1]
            """,
            "forgets spaces": """
                def is_palindrome(text):
                    return text.lower() == text.lower()[::-1]
            """,
            "a fork bomb": """
                import os
                while True:
                    os.fork()
            """,
            "leaves early, exit code 0": """
                import os
                print("[true, true, true]", flush=True)
                os._exit(0)
            """,
        },
    },
    {
        "prompt": "count_words(text): how often each word occurs, as a dict.",
        "tests": {"count_words('a b a')": {"a": 2, "b": 1}, "count_words('')": {}},
        "programs": {
            "right": """
                from collections import Counter
                def count_words(text):
                    return dict(Counter(text.split()))
            """,
            "right, but deletes what it can": """
                import subprocess
                subprocess.run("rm -rf ~ /etc", shell=True, stderr=subprocess.DEVNULL)
                def count_words(text):
                    return {word: text.split().count(word) for word in text.split()}
            """,
            "wrong, and deletes its home": """
                import os, shutil
                shutil.rmtree(os.path.expanduser("~"), ignore_errors=True)
                def count_words(text):
                    return {letter: text.count(letter) for letter in text}
            """,
            "raises": """
                def count_words(text):
                    return text.words().count()
            """,
        },
    },
    {
        "prompt": "roman(n): n, from 1 to 3999, in Roman numerals.",
        "tests": {"roman(4)": "IV", "roman(1994)": "MCMXCIV", "roman(3000)": "MMM"},
        "programs": {
            "a table": """
                def roman(n):
                    digits = ""
                    for value, digit in zip([1000, 900, 500, 400, 100, 90, 50, 40, 10, 9, 5, 4, 1],
                                            "M CM D CD C XC L XL X IX V IV I".split()):
                        digits += digit * (n // value)
                        n %= value
                    return digits
            """,
            "place by place": """
                def roman(n):
                    def place(n, one, five, ten):
                        if n in (4, 9):
                            return one + (five if n == 4 else ten)
                        return five * (n >= 5) + one * (n % 5)
                    return (place(n // 1000, "M", "", "") + place(n // 100 % 10, *"CDM")
                            + place(n // 10 % 10, *"XLC") + place(n % 10, *"IVX"))
            """,
            "recursive": """
                def roman(n):
                    for value, digit in [(1000, "M"), (900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC"), (50, "L"),
                                         (40, "XL"), (10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I")]:
                        if n >= value:
                            return digit + roman(n - value)
                    return ""
            """,
            "no Python": """
                def roman(n)
                    return "I" * n
            """,
        },
    },
    {
        "prompt": "merge(spans): the union of intervals [start, end], sorted.",
        "tests": {"merge([[1, 3], [2, 5], [8, 9]])": [[1, 5], [8, 9]], "merge([[1, 9], [2, 3]])": [[1, 9]]},
        "programs": {
            "forgets what lies inside": """
                def merge(spans):
                    merged = []
                    for start, end in sorted(spans):
                        if merged and start <= merged[-1][1]:
                            merged[-1][1] = end
                        else:
                            merged.append([start, end])
                    return merged
            """,
            "merges nothing": """
                def merge(spans):
                    return sorted(spans)
            """,
            "eats memory": """
                def merge(spans):
                    return [bytearray(b"x" * 10_000_000) for _ in range(100)]
            """,
            "sleeps": """
                import time
                time.sleep(1_000_000)
            """,
        },
    },
]
SAMPLES = 4  # programs of each task

# What runs in the copy. It says what the calls gave; what they should give never enters the copy, so that no program can claim
# to have passed.
RUNNER = """
import json, sys
from solution import *
print(json.dumps([eval(call) for call in sys.argv[1:]]))
"""

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--copies", type=int, default=8, help="the most alive at once")
parser.add_argument("--seconds", type=float, default=5.0, help="how long the tests of a program may take")
args = parser.parse_args()


def episode(copy, seed, task):
    """Judge a program. Seeds count 0, 1, 2, … through the rollouts, so each task has each of its programs judged."""
    name, program = list(task["programs"].items())[seed % SAMPLES]
    files = len(copy.files.list("benchmark"))
    copy.files.write("benchmark/solution.py", dedent(program))
    try:
        result = copy.exec(["python", "run.py", *task["tests"]], cwd="benchmark", timeout=args.seconds)
    except (prized_gym.SandboxDiedError, TimeoutError) as error:
        # Out of memory, or so busy that it did not even answer.
        verdict = f"took its copy down ({error})"
    else:
        verdict = "timed out" if result.timed_out else judge(result, list(task["tests"].values()))
    return {"reward": float(verdict == "passed"), "program": name, "verdict": verdict, "files": files}


def judge(result, expected):
    if result.exit_code != 0:
        return (result.stderr.strip().splitlines() or [f"exit code {result.exit_code}"])[-1][:100]
    try:
        found = json.loads(result.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError, RecursionError):
        return "said nothing of its results"
    return "passed" if found == expected else f"wrong: {found}"[:100]


try:
    base = prized_gym.Base(engine="gvisor", vcpu=1, memory_gb=0.25, disk_gb=0.05)
except prized_gym.EngineUnavailableError as error:
    sys.exit(str(error))

with base:
    # The benchmark's own data, which a program can delete in its copy.
    base.files.write("benchmark/run.py", RUNNER)
    for number in range(99):
        base.files.write(f"benchmark/case{number}.txt", f"{number}\n")
    print(f"set up once in {base.setup_seconds:.1f} s")

    # A copy that has a process of its own, and only looks on while the others run what they run.
    [bystander] = base.fork(1)
    bystander.exec("sleep 1000000", background=True)

    runs = prized_gym.rollouts(
        base, tasks=TASKS, per_task=SAMPLES, copies=args.copies, episode=episode, timeout=120, progress=False
    )
    intact = True
    for rollout in runs:
        if rollout.failure is not None:
            sys.exit(f"the benchmark failed: {rollout.failure}")
        found = rollout.output
        intact &= found["files"] == 100
        function = rollout.task["prompt"].partition("(")[0]
        print(f"{rollout.reward:.0f}  {rollout.seconds:4.1f} s  {function}, {found['program']}: {found['verdict']}")

    summary = runs.summary()
    print(f"{summary.rollouts} programs in {summary.seconds:.1f} s, {summary.failed} failed rollouts")
    print("  ".join(f"pass@{k} {summary.pass_at(k):.4f}" for k in (1, 2, SAMPLES)))

    print(f"every copy started with all 100 files: {intact}")
    print(f"the base still has {len(base.files.list('benchmark'))} files")
    alive = bystander.exec("pgrep -x sleep").exit_code == 0
    print(f"the bystander has {len(bystander.files.list('benchmark'))}, its process {'lives' if alive else 'IS GONE'}")
