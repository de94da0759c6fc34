"""What the env server does with a request: the environment and its endpoints, all on one thread."""

from __future__ import annotations

import dataclasses
import gc
import traceback
from collections.abc import Callable
from typing import Any

import gymnasium as gym

from prized_gym.calls import perform
from prized_gym.errors import PrizedGymError
from prized_gym.generators import Generators
from prized_gym.recipe import Built, Recipe
from prized_gym.seeding import reseed
from prized_gym.server.http import Answer
from prized_gym.wire.codec import Encoded, Limits, decode, encode_info, encode_parts
from prized_gym.wire.errors import WireError
from prized_gym.wire.spaces import space_to_data

__all__ = ["Host", "error_answer"]

_INFO_DEPTH = 8  # an info lies a few levels deep in an answer, which is read with one bound for all of it


class BadRequest(PrizedGymError, ValueError):
    """A request that makes no sense; the environment was not touched."""


class Host:
    """The environments of one base, and the one that this copy of it is.

    Args:
        recipe: what they were built from.
        built: they themselves.
        seconds: how long building took.
        limits: the bounds of requests and answers.
    """

    def __init__(self, recipe: Recipe, built: Built, seconds: float, limits: Limits) -> None:
        self.recipe, self.built, self.seconds, self.limits = recipe, built, seconds, limits
        self.info_limits = limits._replace(max_depth=limits.max_depth - _INFO_DEPTH)
        self.env = built.envs[0]
        self.generators = Generators()
        self.look()
        self.initial: list[dict[str, Any]] = []  # one for each environment, once they were reset in the base
        self.which = 0
        self.moved = False
        self.closed = False
        self.posts: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "/start": self.start,
            "/reset_base": self.reset_base,
            "/reset": self.reset,
            "/step": self.step,
            "/call": self.call,
            "/set_attr": self.set_attr,
            "/reseed": self.reseed,
            "/render": self.render,
            "/close": self.close,
        }

    def answer(self, method: str, path: str, content_type: str, body: bytes) -> Answer:
        """The answer to one request; never raises an ``Exception``, nor the environment's ``SystemExit``."""
        try:
            if path == "/spaces":
                if method != "GET":
                    return error_answer(405, BadRequest("GET /spaces"))
                return Answer(200, encode_parts(self.describe(), limits=self.limits, what="answer"))
            if path not in self.posts:
                paths = ", ".join(["/health", "/stack", "/spaces", *self.posts])
                return error_answer(404, BadRequest(f"there is no {path[:100]!r} here, but {paths}"))
            if method != "POST":
                return error_answer(405, BadRequest(f"POST {path}"))
            # A web page may not send this type to another origin without asking first, so none can drive this server.
            if content_type != "application/msgpack":
                return error_answer(415, BadRequest("send the body as application/msgpack"))
            try:
                fields = decode(body, limits=self.limits, copy=True) if body else {}
            except WireError as error:
                raise BadRequest(f"the body cannot be read: {error}") from error
            if not isinstance(fields, dict):
                raise BadRequest(f"the body is {type(fields).__name__}, not a map")
            return Answer(200, encode_parts(self.posts[path](fields), limits=self.limits, what="answer"))
        except BadRequest as error:
            return error_answer(400, error)
        except (Exception, SystemExit) as error:
            return error_answer(500, error)

    # What GET gives

    def describe(self) -> dict[str, Any]:
        """The answer to ``GET /spaces``."""
        env = self.env
        spec = getattr(env, "spec", None)
        return {
            "observation_space": space_to_data(env.observation_space, "observation_space"),
            "action_space": space_to_data(env.action_space, "action_space"),
            "metadata": self.info(env.metadata, "metadata"),
            "render_mode": env.render_mode,
            "spec": None if spec is None else self.info(_spec_fields(spec), "spec"),
            "seconds": self.seconds,
        }

    # What POST does

    def start(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Give a new fork what comes before anything else."""
        self.begin(_take(fields, "fresh", dict, required=True))
        return {}

    def reset_base(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Reset every environment once, for the copies to start from."""
        seed = _take(fields, "seed", int)
        if self.moved:
            raise BadRequest("a base is never stepped, and this environment has been")
        if not self.initial:
            # Encoded at once, which is what each copy then sends.
            self.initial = [_owned(self.observed(*env.reset(seed=seed))) for env in self.built.envs]
            self.look()
        return {}

    def reset(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Begin an episode."""
        seed = _take(fields, "seed", int)
        options = _take(fields, "options", dict)
        fresh = _take(fields, "fresh", dict)
        from_base = _take(fields, "base", bool)
        if fresh is not None:
            self.begin(fresh)
        if not from_base:
            return self.began(seed, options)
        if not self.initial:
            raise BadRequest("the base was not reset: POST /reset_base, or start the server with --reset-in-base SEED")
        if self.moved:
            raise BadRequest("this environment has moved on since the base was reset")
        return self.initial[self.which]

    def step(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Take steps, up to the end of the episode."""
        if ("action" in fields) == ("actions" in fields):
            raise BadRequest("a step takes either 'action' or 'actions'")
        actions = _take(fields, "actions", list, required=True) if "actions" in fields else [fields["action"]]
        then_reset = _take(fields, "then_reset", bool)
        if not actions:
            raise BadRequest("there are no actions")
        self.moved = True
        steps: list[dict[str, Any]] = []
        over = False
        for action in actions:
            # The next step or the reset may overwrite a buffer that the environment reuses.
            steps[-1:] = [_owned(step) for step in steps[-1:]]
            observation, reward, terminated, truncated, info = self.env.step(action)
            over = bool(terminated) or bool(truncated)
            step = self.observed(observation, info)
            step |= {"reward": float(reward), "terminated": bool(terminated), "truncated": bool(truncated)}
            steps.append(step)
            if over:
                break
        if not (over and then_reset):
            return {"steps": steps, "reset": None}
        steps[-1] = _owned(steps[-1])
        return {"steps": steps, "reset": self.began(None, None)}

    def call(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Call a method, or read an attribute."""
        name = _take(fields, "name", str, required=True)
        args = fields.get("args")
        kwargs = _take(fields, "kwargs", dict) or {}
        if args is not None and not isinstance(args, (list, tuple)):
            raise BadRequest("args is a list")
        result = perform(self.env, name, args or (), kwargs)
        if isinstance(result, gym.Space):
            return {"space": space_to_data(result, name)}
        return {"result": encode_parts(result, limits=self.info_limits, what=f"the result of {name!r}")}

    def set_attr(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Set attributes."""
        for name, value in _take(fields, "values", dict, required=True).items():
            self.env.set_wrapper_attr(name, value)
        return {}

    def reseed(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Seed every generator, of whatever was made so far."""
        reseed(self.env, _seed(fields), generators=self.generators.fresh(self.env))
        return {}

    def render(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Render a frame."""
        return {"frame": encode_parts(self.env.render(), limits=self.info_limits, what="the rendered frame")}

    def close(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Close the environments; the server ends."""
        if not self.closed:
            self.closed = True
            for env in self.built.envs:
                env.close()
        return {}

    # Shared

    def look(self) -> None:
        """Find the generators of the process, and hide all it holds from the collector, which would write to all of it."""
        gc.collect()
        self.generators.collect(self.built.envs)
        gc.freeze()

    def begin(self, fresh: dict[str, Any]) -> None:
        """Make this the environment of a new fork."""
        seed, copy = _seed(fresh), _take(fresh, "copy", int) or 0
        attributes = _take(fresh, "attributes", dict) or {}
        try:
            which = self.built.which(copy)
        except IndexError:
            raise BadRequest(f"the base has no environment for copy {copy}") from None
        self.env, self.which = self.built.envs[which], which
        reseed(self.env, seed, generators=self.generators.of(self.env))
        if self.recipe.on_fork is not None:
            self.recipe.on_fork(self.env, copy, seed)
        self.set_attr({"values": attributes})

    def began(self, seed: int | None, options: dict[str, Any] | None) -> dict[str, Any]:
        """Reset this copy's environment."""
        self.moved = True
        return self.observed(*self.env.reset(seed=seed, options=options))

    def observed(self, observation: Any, info: Any) -> dict[str, Any]:
        """Encode what a step or a reset gave; its large arrays are sent from where they lie."""
        return {
            "obs": encode_parts(observation, limits=self.info_limits, what="observation"),
            "info": self.info(info, "info"),
        }

    def info(self, info: Any, what: str) -> Encoded:
        """Encode an info, what cannot be sent replaced by words."""
        return encode_parts(info, limits=self.info_limits, what=what, lossy=True)


def _owned(observed: dict[str, Any]) -> dict[str, Any]:
    """What was observed, whatever the environment does with its arrays from here on."""
    return {name: value.owned() if isinstance(value, Encoded) else value for name, value in observed.items()}


def _take(fields: dict[str, Any], name: str, kind: type[Any], *, required: bool = False) -> Any:
    value = fields.get(name)
    if value is None and not required:
        return None
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise BadRequest(f"{name!r} is {type(value).__name__}, not {kind.__name__}")
    return value


def _seed(fields: dict[str, Any]) -> int:
    seed: int = _take(fields, "seed", int, required=True)
    if seed < 0:
        raise BadRequest(f"a seed is not negative, got {seed}")
    return seed


def _spec_fields(spec: Any) -> dict[str, Any]:
    if not dataclasses.is_dataclass(spec):
        return {"id": str(getattr(spec, "id", spec))}
    return {field.name: getattr(spec, field.name, None) for field in dataclasses.fields(spec)}


def error_answer(status: int, error: BaseException) -> Answer:
    """``error`` as an answer: its type, message, plain arguments and traceback."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    try:
        message = str(error)
    except Exception:
        message = f"<{name} whose text cannot be made>"
    plain = all(isinstance(each, (str, int, float, type(None))) and len(str(each)) < 10_000 for each in error.args)
    described = {
        "type": name,
        "message": message[:20_000],
        "args": list(error.args) if plain else None,
        "traceback": "" if status < 500 else "".join(traceback.format_exception(error))[-20_000:],
        "exited": isinstance(error, SystemExit),
    }
    return Answer(status, encode_info({"error": described}))
