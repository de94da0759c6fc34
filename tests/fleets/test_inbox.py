"""What copies have finished, kept until somebody asks for it."""

from __future__ import annotations

from prized_gym.fleets.inbox import Inbox
from prized_gym.interface.failure import not_forked
from prized_gym.interface.fleet import Finished


def test_what_is_added_is_taken_once() -> None:
    inbox = Inbox()
    inbox.add(Finished([0, 2], infos={2: {"a": 1}}, results={0: "zero"}))
    inbox.add(Finished([1], finals={1: ("last", {})}, failures={1: not_forked(1)}))
    assert inbox.copies == {0, 1, 2}
    taken = inbox.take([2, 1])
    assert taken == Finished([1, 2], {2: {"a": 1}}, {1: ("last", {})}, {}, {1: not_forked(1)})
    assert inbox.take([1, 2]) == Finished([])
    assert inbox.take([0, 5]) == Finished([0], results={0: "zero"})
    assert not inbox.copies


def test_cleared_it_holds_nothing() -> None:
    inbox = Inbox()
    inbox.add(Finished([0], infos={0: {"a": 1}}, failures={0: not_forked(0)}))
    inbox.clear()
    assert inbox.take([0]) == Finished([])
