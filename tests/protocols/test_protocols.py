"""Protocols without any I/O: what they ask, what they make of an answer, and what they refuse."""

from __future__ import annotations

import doctest
import json
import pickle
import time

import numpy as np
import pytest
from gymnasium import spaces

from prized_gym import protocols
from prized_gym.protocols import (
    EpisodeProtocol,
    Fresh,
    GymProtocol,
    Protocol,
    ProtocolError,
    RemoteError,
    Response,
    ServerDescription,
    StepAnswer,
)
from prized_gym.wire import decode, encode, space_to_data

URL = "http://copy/step"
MSGPACK = {"content-type": "application/msgpack"}


def answer(value, status: int = 200) -> Response:
    return Response(status, MSGPACK, encode(value), URL)


def gym_protocol() -> GymProtocol:
    protocol = GymProtocol()
    protocol.description = ServerDescription(spaces.Box(-1, 1, (2,)), spaces.Discrete(2))
    return protocol


GOOD_STEP = {"obs": np.zeros(2, np.float32), "reward": 1.0, "terminated": False, "truncated": False, "info": {}}
END_STEP = GOOD_STEP | {"terminated": True}
GOOD_RESET = {"obs": np.zeros(2, np.float32), "info": {"a": 1}}


def test_the_example_in_the_docstring_runs() -> None:
    assert doctest.testmod(protocols).failed == 0


def test_requests_say_what_is_asked() -> None:
    protocol = gym_protocol()
    request = protocol.reset(5, {"a": 1}, fresh=Fresh(7, copy=2, attributes={"x": 1}))
    assert (request.method, request.path) == ("POST", "/reset")
    fresh = {"seed": 7, "copy": 2, "attributes": {"x": 1}}
    assert decode(request.body) == {"seed": 5, "options": {"a": 1}, "fresh": fresh}
    assert decode(protocol.step(None).body) == {"actions": [None], "then_reset": False}
    assert decode(protocol.step(np.int64(1), then_reset=True).body) == {"actions": [1], "then_reset": True}
    assert decode(protocol.call("f", (1, (2,))).body) == {"name": "f", "args": [1, (2,)]}
    with pytest.raises(ValueError, match="no actions"):
        protocol.steps([])


def test_a_description_is_read() -> None:
    space = spaces.Dict({"a": spaces.Text(5)})
    fields = {"observation_space": space_to_data(space), "action_space": space_to_data(spaces.Discrete(3))}
    fields |= {"metadata": {"render_fps": 5}, "render_mode": None, "spec": {"id": "X-v0"}, "seconds": 0.5}
    description = GymProtocol().read_describe(answer(fields))
    assert description.observation_space == space
    assert description.spec == {"id": "X-v0"}
    broken = [
        {"observation_space": {"type": "Box"}},
        {"metadata": [1]},
        {"render_mode": 5},
        {"spec": "os:system"},
        {"seconds": "1"},
    ]
    for wrong in broken:
        with pytest.raises(ProtocolError):
            GymProtocol().read_describe(answer(fields | wrong))


def test_a_good_step_is_read() -> None:
    step = gym_protocol().read_step(answer({"steps": [END_STEP], "reset": GOOD_RESET}))
    assert (step.reward, step.terminated, step.truncated, step.info) == (1.0, True, False, {})
    assert step.reset[1] == {"a": 1}
    assert step.obs.flags.writeable
    assert GymProtocol(copy=False).copy is False


WRONG_STEPS = {
    "nothing": {},
    "no steps": {"steps": []},
    "steps that are a map": {"steps": {"a": 1}},
    "a step that is a list": {"steps": [[1]]},
    "two steps": {"steps": [GOOD_STEP, GOOD_STEP]},
    "steps after the end": {"steps": [END_STEP, GOOD_STEP]},
    "no observation": {"steps": [{}]},
    "another shape": {"steps": [GOOD_STEP | {"obs": np.zeros(3, np.float32)}]},
    "a reward of text": {"steps": [GOOD_STEP | {"reward": "1"}]},
    "a reward that is a list": {"steps": [GOOD_STEP | {"reward": [1.0]}]},
    "no reward": {"steps": [GOOD_STEP | {"reward": None}]},
    "terminated by a number": {"steps": [GOOD_STEP | {"terminated": 1}]},
    "an info that is a list": {"steps": [GOOD_STEP | {"info": []}]},
    "an info with odd keys": {"steps": [GOOD_STEP | {"info": {1: 2}}]},
    "a reset without an end": {"steps": [GOOD_STEP], "reset": GOOD_RESET},
    "a wrong reset": {"steps": [END_STEP], "reset": {"obs": 5, "info": {}}},
}


@pytest.mark.parametrize("value", WRONG_STEPS.values(), ids=WRONG_STEPS.keys())
def test_a_wrong_step_is_refused(value) -> None:
    with pytest.raises(ProtocolError, match=URL):
        gym_protocol().read_step(answer(value))


WRONG_ANSWERS = {
    "a pickle": Response(200, MSGPACK, pickle.dumps({"steps": []}), URL),
    "HTML": Response(200, {"content-type": "text/html"}, b"<html>", URL),
    "a gateway's error": Response(502, {"content-type": "text/html"}, b"<html>Bad Gateway" + b"x" * 10**6, URL),
    "nothing": Response(200, MSGPACK, b"", URL),
    "a list": answer([1]),
    "an error without fields": answer({"error": 5}, 500),
    "an error of wrong fields": answer({"error": {"type": 1, "message": [], "traceback": {}}}, 500),
    "an error that is none": answer({"steps": [GOOD_STEP]}, 500),
    "too much": Response(200, MSGPACK, encode(b"x" * 10**6), URL),
}


@pytest.mark.parametrize("response", WRONG_ANSWERS.values(), ids=WRONG_ANSWERS.keys())
def test_a_wrong_answer_names_url_and_status_and_a_piece_of_the_body(response: Response) -> None:
    protocol = gym_protocol()
    protocol.max_answer_bytes = 10**5
    with pytest.raises(ProtocolError) as caught:
        protocol.read_step(response)
    assert caught.value.url == URL
    assert URL in str(caught.value)
    assert len(str(caught.value)) < 5000


def test_a_remote_error_of_a_hostile_type_is_never_looked_up_elsewhere() -> None:
    for name in (
        "SystemExit",
        "KeyboardInterrupt",
        "os.system",
        "builtins.exec",
        "exec",
        "print",
        "__import__",
        "a.b.C",
        "",
    ):
        error = {"type": name, "message": "m", "args": ["x"], "traceback": "t"}
        with pytest.raises(RemoteError) as caught:
            gym_protocol().read_step(answer({"error": error}, 500))
        assert caught.value.original() is caught.value
    error = {"type": "UnicodeDecodeError", "message": "m", "args": ["x"], "traceback": "t"}
    with pytest.raises(RemoteError) as caught:
        gym_protocol().read_step(answer({"error": error}, 500))
    assert caught.value.original() is caught.value
    error = {"type": "gymnasium.error.ResetNeeded", "message": "m" * 10**5, "args": None, "traceback": "t" * 10**5}
    with pytest.raises(RemoteError) as caught:
        gym_protocol().read_step(answer({"error": error}, 500))
    assert type(caught.value.original()).__name__ == "ResetNeeded"
    assert len(str(caught.value)) < 50_000


def test_a_protocol_of_ones_own() -> None:
    class Plain(Protocol):
        description = ServerDescription(spaces.Discrete(2), spaces.Discrete(2))

        def reset(self, seed, options, *, fresh=None, base=False):
            return protocols.Request("GET", f"/new?seed={seed}")

        def read_reset(self, response):
            return np.int64(0), {}

        def step(self, action, *, then_reset=False):
            return protocols.Request("GET", f"/act?{action}")

        def read_step(self, response):
            return StepAnswer(np.int64(1), 0.0, True, False, {})

    plain = Plain()
    assert plain.ready() is None
    assert plain.read_ready(None) is True
    assert plain.describe() is None
    assert plain.read_describe(None).action_space == spaces.Discrete(2)
    assert plain.stack() is None
    assert plain.read_stack(None) == ""
    asked = [
        (plain.render, ()),
        (plain.reseed, (1,)),
        (plain.call, ("f",)),
        (plain.set_attr, ({},)),
        (plain.start, (Fresh(1),)),
    ]
    for method, args in [*asked, (plain.reset_base, (1,))]:
        with pytest.raises(ProtocolError, match="the server that Plain speaks to cannot"):
            method(*args)
    with pytest.raises(ProtocolError, match=r"\(HTTP 500\): the server refused\nno"):
        plain.read_set_attr(Response(500, {}, b"no", URL))
    assert plain.fork() is not plain


# One request, one episode


def play(protocol: EpisodeProtocol, body, status: int = 200):
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return protocol.read_step(Response(status, {}, raw, "http://copy/rollout?seed=1"))


def test_an_episode_is_one_step() -> None:
    protocol = EpisodeProtocol(timeout=120)
    assert protocol.reset(7, None) is None
    obs, info = protocol.read_reset(None)
    assert (obs, info) == (0, {"seed": 7})
    request = protocol.step(np.int64(0))
    assert (request.method, request.path, request.body, request.timeout) == ("GET", "/rollout?seed=7", b"", 120)
    step = play(protocol, {"seed": 7, "reward": 0.25, "text": "a film"})
    assert (step.obs, step.reward, step.terminated, step.truncated, step.reset) == (0, 0.25, True, False, None)
    assert step.info == {"seed": 7, "reward": 0.25, "text": "a film"}


def test_seeds_without_a_seed_follow_the_last_one_and_a_fork_goes_its_own_way() -> None:
    def seeds(protocol: EpisodeProtocol, count: int = 3) -> list[int]:
        drawn = []
        for _ in range(count):
            protocol.reset(None, None)
            drawn.append(protocol.read_reset(None)[1]["seed"])
        return drawn

    protocol = EpisodeProtocol()
    protocol.reset(7, None)
    branch = protocol.fork()
    expected = seeds(protocol)
    assert seeds(branch) == expected
    assert len(set(expected)) == 3
    branch.reseed(8)
    assert seeds(branch) != expected
    branch.reset(None, None, fresh=Fresh(9))
    first = branch.read_reset(None)[1]["seed"]
    branch.start(Fresh(9))
    assert seeds(branch, 1) == [first]
    protocol.step(0, then_reset=True)
    assert play(protocol, {"reward": 1}).reset[1]["seed"] not in expected


def test_the_action_reaches_the_path_and_the_body() -> None:
    protocol = EpisodeProtocol(
        "/play/{action}?s={seed}",
        body={"seed": "{seed}", "move": "{action}", "text": "seed {seed}: {action}", "list": ["{action}", 1.5, None]},
        action_space=spaces.MultiDiscrete([3, 3]),
        headers={"Authorization": "x"},
    )
    protocol.reset(3, None)
    request = protocol.step(np.array([1, 2]))
    assert request.method == "POST"
    assert request.path == "/play/%5B1%2C%202%5D?s=3"
    assert request.headers == {"Content-Type": "application/json", "Authorization": "x"}
    assert json.loads(request.body) == {
        "seed": 3,
        "move": [1, 2],
        "text": "seed 3: [1, 2]",
        "list": [[1, 2], 1.5, None],
    }
    text = EpisodeProtocol("/say/{action}", body="{action}", action_space=spaces.Text(50))
    text.reset(1, None)
    request = text.step("a/b?{seed} é")
    assert request.path == "/say/a%2Fb%3F%7Bseed%7D%20%C3%A9"
    assert json.loads(request.body) == "a/b?{seed} é"
    made = EpisodeProtocol(body=lambda seed, action, options: {"s": seed, "a": action, "o": options, "t": "{seed}"})
    made.reset(4, {"level": 2})
    assert json.loads(made.step(np.float32(0.5)).body) == {"s": 4, "a": 0.5, "o": {"level": 2}, "t": "{seed}"}


def test_a_reward_can_be_computed() -> None:
    assert play(EpisodeProtocol(reward=lambda answer: sum(answer)), [1, 2]).reward == 3.0
    assert play(EpisodeProtocol(reward=lambda answer: sum(answer)), [1, 2]).info == {"answer": [1, 2]}
    assert play(EpisodeProtocol(), {"reward": True}).reward == 1.0


BAD_EPISODES = {
    "no reward": {"score": 1},
    "a list": [1, 2],
    "a reward of text": {"reward": "0.5"},
    "a reward of null": {"reward": None},
    "a reward of NaN": b'{"reward": NaN}',
    "an infinite reward": b'{"reward": 1e999}',
    "no JSON": b"<html>",
    "nothing": b"",
    "half": b'{"reward": 0.5',
    "not UTF-8": b'{"reward": "\xff"}',
    "deep nesting": b"[" * 1_000_000,
    "a huge integer": b'{"reward": ' + b"9" * 1_000_000 + b"}",
    "a large integer": b'{"reward": ' + b"9" * 1000 + b"}",
    "a pickle": pickle.dumps({"reward": 1.0}),
    "too much": b'{"reward": 1}' + b" " * (17 << 20),
}


@pytest.mark.parametrize("body", BAD_EPISODES.values(), ids=BAD_EPISODES.keys())
def test_a_bad_episode_is_refused_at_once(body) -> None:
    started = time.process_time()
    with pytest.raises(ProtocolError, match=r"http://copy/rollout\?seed=1 \(HTTP 200\)") as caught:
        play(EpisodeProtocol(), body)
    assert len(str(caught.value)) < 3000
    assert time.process_time() - started < 2


def test_a_failed_episode_shows_what_the_server_said() -> None:
    with pytest.raises(ProtocolError, match=r"\(HTTP 500\): the server failed to play the episode\nout of memory"):
        play(EpisodeProtocol(), b"out of memory", 500)
    with pytest.raises(ProtocolError, match="cannot set an attribute"):
        EpisodeProtocol().start(Fresh(1, attributes={"a": 1}))
    with pytest.raises(ProtocolError, match="cannot start from a reset made in the base"):
        EpisodeProtocol().reset(1, None, base=True)
    assert EpisodeProtocol(ready="/health").ready().path == "/health"
    assert EpisodeProtocol().ready() is None
    assert EpisodeProtocol().read_ready(Response(503, {}, b"", "")) is False
