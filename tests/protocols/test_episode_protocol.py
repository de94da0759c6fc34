"""The protocol of one request per episode, without I/O."""

from __future__ import annotations

import json
import pickle
import time
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from prized_gym.protocols import (
    EpisodeProtocol,
    Exchange,
    Fresh,
    ProtocolError,
    Request,
    Response,
    StepAnswer,
    UnsupportedError,
    drive,
)


def nobody(request: Request) -> Response:
    raise AssertionError(f"{request} was asked")


def begin(protocol: EpisodeProtocol, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
    """A reset, which asks nothing."""
    return drive(protocol.reset(*args, **kwargs), nobody)


def asked(operation: Exchange[Any]) -> Request:
    request = next(operation)
    operation.close()
    return request


def play(protocol: EpisodeProtocol, body: Any, status: int = 200, then_reset: bool = False) -> StepAnswer:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = Response(status, {}, raw, "http://copy/rollout?seed=1")
    return drive(protocol.step(0, then_reset=then_reset), lambda request: response)


def test_an_episode_is_one_step() -> None:
    protocol = EpisodeProtocol(timeout=120)
    assert begin(protocol, 7, None) == (0, {"seed": 7})
    request = asked(protocol.step(np.int64(0)))
    assert (request.method, request.path, request.body, request.timeout) == ("GET", "/rollout?seed=7", b"", 120)
    step = play(protocol, {"seed": 7, "reward": 0.25, "text": "a film"})
    assert (step.obs, step.reward, step.terminated, step.truncated, step.reset) == (0, 0.25, True, False, None)
    assert step.info == {"seed": 7, "reward": 0.25, "text": "a film"}


def test_seeds_without_a_seed_follow_the_last_one_and_a_fork_goes_its_own_way() -> None:
    def seeds(protocol: EpisodeProtocol, count: int = 3) -> list[int]:
        drawn = []
        for _ in range(count):
            drawn.append(begin(protocol, None, None)[1]["seed"])
        return drawn

    protocol = EpisodeProtocol()
    begin(protocol, 7, None)
    branch = protocol.fork()
    expected = seeds(protocol)
    assert seeds(branch) == expected
    assert len(set(expected)) == 3
    drive(branch.reseed(8), nobody)
    assert seeds(branch) != expected
    first = begin(branch, None, None, fresh=Fresh(9))[1]["seed"]
    drive(branch.start(Fresh(9)), nobody)
    assert seeds(branch, 1) == [first]
    over = play(protocol, {"reward": 1}, then_reset=True)
    assert over.reset is not None and over.reset[1]["seed"] not in expected
    assert f"seed={over.reset[1]['seed']}" in asked(protocol.step(0)).path


def test_operations_under_way_do_not_disturb_each_other() -> None:
    protocol = EpisodeProtocol()
    begin(protocol, 3, None)
    one, other = protocol.step(0, then_reset=True), protocol.step(0)
    assert next(one).path == next(other).path == "/rollout?seed=3"
    answer = Response(200, {}, b'{"reward": 1}')
    with pytest.raises(StopIteration) as ended:
        other.send(answer)
    assert ended.value.value.reset is None
    with pytest.raises(StopIteration) as ended:
        one.send(answer)
    assert ended.value.value.reset is not None


def test_the_action_reaches_the_path_and_the_body() -> None:
    protocol = EpisodeProtocol(
        "/play/{action}?s={seed}",
        body={"seed": "{seed}", "move": "{action}", "text": "seed {seed}: {action}", "list": ["{action}", 1.5, None]},
        action_space=spaces.MultiDiscrete([3, 3]),
        headers={"Authorization": "x"},
    )
    begin(protocol, 3, None)
    request = asked(protocol.step(np.array([1, 2])))
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
    begin(text, 1, None)
    request = asked(text.step("a/b?{seed} é"))
    assert request.path == "/say/a%2Fb%3F%7Bseed%7D%20%C3%A9"
    assert json.loads(request.body) == "a/b?{seed} é"
    made = EpisodeProtocol(body=lambda seed, action, options: {"s": seed, "a": action, "o": options, "t": "{seed}"})
    begin(made, 4, {"level": 2})
    assert json.loads(asked(made.step(np.float32(0.5))).body) == {"s": 4, "a": 0.5, "o": {"level": 2}, "t": "{seed}"}


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


def test_what_cannot_be_asked_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="cannot set an attribute"):
        drive(EpisodeProtocol().start(Fresh(1, attributes={"a": 1})), nobody)
    with pytest.raises(UnsupportedError, match="cannot start from a reset made in the base"):
        begin(EpisodeProtocol(), 1, None, base=True)
    with pytest.raises(UnsupportedError, match="the server that EpisodeProtocol speaks to cannot render"):
        EpisodeProtocol().render()


def test_a_target_says_whether_it_is_ready() -> None:
    assert drive(EpisodeProtocol().ready(), nobody) is None
    protocol = EpisodeProtocol(ready="/health")
    assert asked(protocol.ready()).path == "/health"
    assert drive(protocol.ready(), lambda request: Response(503, {}, b"")) is False
    assert drive(protocol.ready(), lambda request: Response(204, {}, b"")) is True


def test_an_action_that_is_not_in_the_path_is_not_written_for_it() -> None:
    for action in (object(), b"bytes", "\ud800"):
        protocol = EpisodeProtocol("/rollout?seed={seed}", body=lambda seed, action, options: {"seed": seed})
        begin(protocol, 3, None)
        request = asked(protocol.step(action))
        assert (request.path, request.body) == ("/rollout?seed=3", b'{"seed": 3}')
