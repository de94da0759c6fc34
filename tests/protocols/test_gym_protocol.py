"""The protocol of our own server, without I/O: what it asks, what it makes of an answer, and what it refuses."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from prized_gym.protocols import (
    Exchange,
    Fresh,
    GymProtocol,
    ProtocolError,
    RemoteError,
    Request,
    Response,
    ServerDescription,
    StepAnswer,
    drive,
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


def asked(operation: Exchange[Any]) -> Request:
    """What an operation asks first."""
    request = next(operation)
    operation.close()
    return request


def read(operation: Exchange[Any], response: Response) -> Any:
    """What an operation of one request makes of the answer."""
    return drive(operation, lambda request: response)


def step(response: Response, protocol: GymProtocol | None = None) -> StepAnswer:
    return read((protocol or gym_protocol()).step(0), response)


def test_requests_say_what_is_asked() -> None:
    protocol = gym_protocol()
    request = asked(protocol.reset(5, {"a": 1}, fresh=Fresh(7, copy=2, attributes={"x": 1})))
    assert (request.method, request.path) == ("POST", "/reset")
    fresh = {"seed": 7, "copy": 2, "attributes": {"x": 1}}
    assert decode(request.body) == {"seed": 5, "options": {"a": 1}, "fresh": fresh}
    assert decode(asked(protocol.reset(None, None, base=True)).body) == {"base": True}
    assert decode(asked(protocol.start(Fresh(3))).body) == {"fresh": {"seed": 3, "copy": 0, "attributes": {}}}
    assert decode(asked(protocol.step(None)).body) == {"actions": [None], "then_reset": False}
    assert decode(asked(protocol.step(np.int64(1), then_reset=True)).body) == {"actions": [1], "then_reset": True}
    assert decode(asked(protocol.call("f", (1, (2,)))).body) == {"name": "f", "args": [1, (2,)]}
    assert decode(asked(protocol.set_attr({"a": None})).body) == {"values": {"a": None}}
    assert decode(asked(protocol.reseed(5)).body) == decode(asked(protocol.reset_base(5)).body) == {"seed": 5}
    paths = [asked(operation).path for operation in (protocol.ready(), protocol.stack(), protocol.render())]
    assert paths == ["/health", "/stack", "/render"]
    with pytest.raises(ValueError, match="no actions"):
        asked(protocol.steps([]))


def test_a_description_is_read() -> None:
    space = spaces.Dict({"a": spaces.Text(5)})
    fields = {"observation_space": space_to_data(space), "action_space": space_to_data(spaces.Discrete(3))}
    fields |= {"metadata": {"render_fps": 5}, "render_mode": None, "spec": {"id": "X-v0"}, "seconds": 0.5}
    description = read(GymProtocol().describe(), answer(fields))
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
            read(GymProtocol().describe(), answer(fields | wrong))


def test_a_good_step_is_read() -> None:
    taken = step(answer({"steps": [END_STEP], "reset": GOOD_RESET}))
    assert (taken.reward, taken.terminated, taken.truncated, taken.info) == (1.0, True, False, {})
    assert taken.reset is not None
    assert taken.reset[1] == {"a": 1}
    assert taken.obs.flags.writeable
    several = read(gym_protocol().steps([0, 1]), answer({"steps": [GOOD_STEP, END_STEP], "reset": None}))
    assert [each.terminated for each in several] == [False, True]


def test_without_copies_only_observations_for_a_batch_are_views() -> None:
    protocol = gym_protocol()
    protocol.copy = False
    image = np.full((20, 20), 3, np.uint8)
    info = {"image": image, "deep": [({"a": image},)], "big": 2**70, "text": "é"}
    response = answer({"steps": [END_STEP | {"info": info}], "reset": GOOD_RESET | {"info": info}})
    over = step(response, protocol)
    assert over.reset is not None
    for owned in (over.obs, over.info["image"], over.info["deep"][0][0]["a"], over.reset[1]["image"]):
        assert owned.flags.writeable and owned.base is None
    assert not over.reset[0].flags.writeable
    assert (over.info["big"], over.info["text"], type(over.info["deep"][0])) == (2**70, "é", tuple)
    going = step(answer({"steps": [GOOD_STEP | {"info": info}]}), protocol)
    assert not going.obs.flags.writeable and going.info["image"].flags.writeable
    first, _ = read(protocol.reset(None, None), answer(GOOD_RESET))
    assert not first.flags.writeable
    # What a batch holds as the object that it is.
    protocol.description = ServerDescription(spaces.Sequence(spaces.Box(-1, 1, (2,)), stack=True), spaces.Discrete(2))
    kept, _ = read(protocol.reset(None, None), answer(GOOD_RESET | {"obs": np.zeros((3, 2), np.float32)}))
    assert kept.flags.writeable
    assert read(protocol.call("f"), answer({"result": image})).flags.writeable
    assert read(protocol.render(), answer({"frame": image})).flags.writeable


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
        step(answer(value))


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
        step(response, protocol)
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
            step(answer({"error": error}, 500))
        assert caught.value.original() is caught.value
    error = {"type": "UnicodeDecodeError", "message": "m", "args": ["x"], "traceback": "t"}
    with pytest.raises(RemoteError) as caught:
        step(answer({"error": error}, 500))
    assert caught.value.original() is caught.value
    error = {"type": "gymnasium.error.ResetNeeded", "message": "m" * 10**5, "args": None, "traceback": "t" * 10**5}
    with pytest.raises(RemoteError) as caught:
        step(answer({"error": error}, 500))
    assert type(caught.value.original()).__name__ == "ResetNeeded"
    assert len(str(caught.value)) < 50_000


def test_what_else_is_read() -> None:
    protocol = gym_protocol()
    space = spaces.Discrete(4)
    assert read(protocol.call("space"), answer({"space": space_to_data(space)})) == space
    with pytest.raises(ProtocolError, match=URL):
        read(protocol.call("space"), answer({"space": {"type": "Box"}}))
    assert read(protocol.ready(), Response(503, {}, b"")) is False
    assert read(protocol.ready(), Response(200, {}, b"")) is True
    assert read(protocol.stack(), Response(200, {}, b"x" * 30_000 + b"\xff")).endswith("x\\xff")
    with pytest.raises(ProtocolError, match=r"\(HTTP 400\): a seed is not negative"):
        read(
            protocol.reseed(-1),
            answer({"error": {"type": "x", "message": "a seed is not negative", "traceback": ""}}, 400),
        )
    with pytest.raises(ProtocolError, match="must be described before"):
        read(GymProtocol().reset(1, None), answer(GOOD_RESET))
