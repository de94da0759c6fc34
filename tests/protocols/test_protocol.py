"""What holds for every protocol: how its operations are driven, and what it need not have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from prized_gym.errors import PrizedGymError
from prized_gym.protocols import (
    Exchange,
    Fresh,
    Protocol,
    ProtocolError,
    RemoteError,
    Request,
    Response,
    ServerDescription,
    StepAnswer,
    UnsupportedError,
    drive,
)
from prized_gym.protocols.base import MAX_REQUESTS, checked
from prized_gym.sandbox.channels.channel import ChannelError
from prized_gym.server.payload import PayloadError
from prized_gym.wire import WireError

FINE = Response(200, {}, b"fine")


def nobody(request: Request) -> Response:
    raise AssertionError(f"{request} was asked")


class Plain(Protocol):
    """No more than must be written; a step takes two requests."""

    description = ServerDescription(spaces.Discrete(2), spaces.Discrete(2))

    def reset(self, seed, options, *, fresh=None, base=False):
        yield Request("GET", f"/new?seed={seed}")
        return np.int64(0), {}

    def step(self, action, *, then_reset=False):
        job = yield Request("GET", f"/act?{action}")
        result = yield Request("GET", f"/result?{job.body.decode()}")
        return StepAnswer(np.int64(1), float(result.body), True, False, {})


def test_reset_and_step_are_enough() -> None:
    plain = Plain()
    assert drive(plain.ready(), nobody) is None
    assert drive(plain.describe(), nobody).action_space == spaces.Discrete(2)
    assert drive(plain.stack(), nobody) == ""
    assert plain.fork() is not plain
    answers = {"/act?1": b"17", "/result?17": b"0.5"}
    assert drive(plain.step(1), lambda request: Response(200, {}, answers[request.path])).reward == 0.5
    refused: list[tuple[Any, tuple[Any, ...]]] = [
        (plain.render, ()),
        (plain.reseed, (1,)),
        (plain.call, ("f",)),
        (plain.set_attr, ({},)),
        (plain.start, (Fresh(1),)),
        (plain.reset_base, (1,)),
    ]
    for method, args in refused:
        with pytest.raises(UnsupportedError, match="the server that Plain speaks to cannot"):
            drive(method(*args), nobody)
    plain.description = None
    with pytest.raises(ProtocolError, match="Plain has no description"):
        drive(plain.describe(), nobody)


def test_every_error_is_one_of_the_librarys() -> None:
    for kind in (ProtocolError, RemoteError, UnsupportedError, WireError, PayloadError, ChannelError):
        assert issubclass(kind, PrizedGymError)
    assert not issubclass(UnsupportedError, ProtocolError)  # no answer was at fault


def returns_a_request() -> Any:
    return Request("GET", "/")


def yields_text() -> Exchange[int]:
    yield "GET /"  # type: ignore[misc]
    return 1


def has_a_bad_repr() -> Exchange[int]:
    class Bad:
        def __repr__(self) -> str:
            raise RuntimeError

    yield Bad()  # type: ignore[misc]
    return 1


def never_ends() -> Exchange[int]:
    while True:
        yield Request("GET", "/")


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (returns_a_request, r"gave Request\(method='GET'.* \(Request\): write it as a generator"),
        (lambda: None, r"gave None \(NoneType\): write it as a generator"),
        (lambda: iter([Request("GET", "/")]), "write it as a generator"),
        (yields_text, r"yields_text yielded 'GET /' \(str\), which is no Request"),
        (has_a_bad_repr, r"has_a_bad_repr yielded a Bad, which is no Request"),
        (never_ends, f"never_ends made more than {MAX_REQUESTS} requests"),
    ],
)
def test_what_is_no_operation_is_a_clear_error(made: Any, message: str) -> None:
    requests: list[Request] = []

    def ask(request: Request) -> Response:
        requests.append(request)
        return FINE

    with pytest.raises(ProtocolError, match=message):
        drive(made(), ask)
    assert len(requests) in (0, MAX_REQUESTS)


def test_the_most_requests_are_allowed() -> None:
    def polls() -> Exchange[int]:
        for _ in range(MAX_REQUESTS):
            yield Request("GET", "/")
        return 5

    assert drive(polls(), lambda request: FINE) == 5


def closing(log: list[str]) -> Iterator[Any]:
    try:
        yield Request("GET", "/")
        yield "nonsense"
    finally:
        log.append("closed")


@pytest.mark.parametrize("error", [ChannelError("timeout", "no answer"), KeyboardInterrupt(), StopIteration(3)])
def test_an_operation_is_closed_when_no_answer_comes(error: BaseException) -> None:
    log: list[str] = []

    def ask(request: Request) -> Response:
        raise error

    with pytest.raises(type(error)):
        drive(closing(log), ask)  # type: ignore[arg-type]
    assert log == ["closed"]


def test_an_operation_is_closed_when_it_is_wrong_or_given_up() -> None:
    log: list[str] = []
    with pytest.raises(ProtocolError, match="nonsense"):
        drive(closing(log), lambda request: FINE)  # type: ignore[arg-type]
    assert log == ["closed"]
    under_way = checked(closing(log))  # type: ignore[arg-type]
    next(under_way)
    under_way.close()
    assert log == ["closed", "closed"]


def test_what_an_operation_raises_comes_out() -> None:
    def raises() -> Exchange[None]:
        yield Request("GET", "/")
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        drive(raises(), lambda request: FINE)
