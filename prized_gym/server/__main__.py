"""``python -m prized_gym.server``: build an environment, serve it, end on SIGTERM, Ctrl-C or POST /close."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

from prized_gym import by_value
from prized_gym.recipe import Recipe, build, resolve
from prized_gym.server.host import Host, error_answer
from prized_gym.server.http import Answer, Listener, plain_error
from prized_gym.server.payload import read_payload
from prized_gym.version import __version__
from prized_gym.wire.codec import Limits


class _Ended(BaseException):
    """Raised in the main thread by a signal; no ``except Exception`` of an environment swallows it."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Status:
    """What /health and /stack tell, while the main thread may be busy."""

    def __init__(self, env: str) -> None:
        self.env = env
        self.ready = False
        self.busy_since: float | None = None
        self.main = threading.get_ident()

    def quick(self, method: str, path: str) -> Answer | None:
        """The answer to a request that needs no environment, else None. Runs on the listener's thread."""
        if path == "/health" and method == "GET":
            since = self.busy_since
            health = {
                "ready": self.ready,
                "version": __version__,
                "env": self.env,
                "pid": os.getpid(),
                "busy_seconds": 0.0 if since is None else round(time.monotonic() - since, 3),
            }
            return Answer(200 if self.ready else 503, json.dumps(health).encode(), "application/json")
        if path == "/stack" and method == "GET":
            frame = sys._current_frames().get(self.main)
            return Answer(200, "".join(traceback.format_stack(frame)).encode(), "text/plain; charset=utf-8")
        if not self.ready:
            return plain_error(503, "the environment is still being built")
        return None


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m prized_gym.server", description="Serve one environment over HTTP.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--env", metavar="ID", help="an id that Gymnasium knows, or package:id")
    what.add_argument("--factory", metavar="MODULE:FUNCTION", help="a function that builds the environment")
    what.add_argument("--pickle", metavar="FILE", help="a payload written by prized_gym.server.write_payload")
    parser.add_argument(
        "--kwargs", metavar="JSON", type=json.loads, default={}, help="keyword arguments of the builder"
    )
    parser.add_argument("--host", default="127.0.0.1", help="where to listen (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one (default: %(default)s)")
    parser.add_argument("--max-episode-steps", metavar="N", type=int, help="put a time limit around the environment")
    parser.add_argument("--render-mode", metavar="MODE")
    parser.add_argument("--warm-up", metavar="MODULE:FUNCTION", help="called with the environment once it is built")
    parser.add_argument("--reset-in-base", metavar="SEED", type=int, help="reset once now; /reset with base gives that")
    parser.add_argument("--max-bytes", metavar="N", type=int, default=256 << 20, help="bounds a request and an answer")
    parser.add_argument("--failure", metavar="FILE", help="where to write why the environment could not be built")
    return parser.parse_args(argv)


def _recipe(args: argparse.Namespace) -> Recipe:
    """The recipe that the arguments describe; a pickled recipe keeps what the arguments do not set."""
    by_value.install_main()
    source = read_payload(args.pickle) if args.pickle else args.env or args.factory
    recipe = source if isinstance(source, Recipe) else _recipe_of(source)
    if args.kwargs:
        recipe.env_kwargs = {**recipe.env_kwargs, **args.kwargs}
    if args.max_episode_steps is not None:
        recipe.max_episode_steps = args.max_episode_steps
    if args.render_mode is not None:
        recipe.render_mode = args.render_mode
    if args.warm_up is not None:
        recipe.warm_up = resolve_function(args.warm_up)
    return recipe


def _recipe_of(source: Any) -> Recipe:
    found = resolve(source)
    return Recipe(tuple(found) if isinstance(found, list) else (found,))


def resolve_function(name: str) -> Any:
    """The callable that ``module:function`` names.

    Raises:
        ValueError: there is none.
    """
    import importlib

    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise ValueError(f"{name!r} is no callable: write it as module:function")
    return found


def _on_signal(number: int, frame: FrameType | None) -> None:
    raise _Ended(0 if number == signal.SIGTERM else 130)


def _serve(args: argparse.Namespace) -> None:
    limits = Limits(max_bytes=args.max_bytes)
    status = Status(args.env or args.factory or Path(args.pickle).name)
    listener = Listener((args.host, args.port), status.quick, limits.max_bytes)
    listener.start()
    started = time.monotonic()
    recipe = _recipe(args)
    built = build(recipe)
    host = Host(recipe, built, time.monotonic() - started, limits)
    if args.reset_in_base is not None:
        host.reset_base({"seed": args.reset_in_base})
    spec = getattr(host.env, "spec", None)
    status.env = status.env if spec is None else spec.id
    status.ready = True
    sys.stderr.write(
        f"prized_gym.server: {status.env} ready on http://{args.host}:{listener.port} (pid {os.getpid()})\n"
    )
    sys.stderr.flush()
    try:
        while not host.closed:
            job = listener.jobs.get()
            status.busy_since = time.monotonic()
            try:
                # A quick request comes this way when its connection still awaited an answer.
                answer = status.quick(job.method, job.path) or host.answer(*job[:4])
            except RecursionError as error:  # raised again while its own answer was made
                answer = error_answer(500, error)
            status.busy_since = None
            job.reply(answer)
    finally:
        host.close({})


def main(argv: list[str] | None = None) -> int:
    """Runs the server until it is told to end; the exit code.

    0 after SIGTERM or POST /close, 130 after Ctrl-C, 1 with a traceback on stderr if the environment cannot be built.
    """
    args = _arguments(argv)
    signal.signal(signal.SIGTERM, _on_signal)
    signal.signal(signal.SIGINT, _on_signal)
    try:
        _serve(args)
    except _Ended as ended:
        return ended.code
    except Exception as error:
        traceback.print_exc()
        if args.failure:
            Path(args.failure).write_bytes(bytes(error_answer(500, error).body))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
