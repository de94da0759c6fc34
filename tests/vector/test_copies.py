"""What a vector environment knows of its copies."""

from __future__ import annotations

import numpy as np

from prized_gym.interface.failure import not_forked
from prized_gym.interface.fleet import Usage
from prized_gym.vector.copies import Copies, EarlyEpisode


def test_episodes_begin_and_end() -> None:
    copies = Copies(3)
    assert not copies.all_reset and copies.over == []
    for index in range(3):
        copies.begin(index, index)
    copies.done[:] = [True, False, True]
    copies.note_done()
    assert copies.all_reset and copies.over == [0, 2]
    copies.begin(2, None)
    copies.note_done()
    assert copies.over == [0] and copies[2].was_reset


def test_streams_of_seeds_differ_and_repeat() -> None:
    copies = Copies(2)
    assert copies[0].seeds.next() != copies[1].seeds.next()
    copies.reseed(0, 7)
    first = [copies[0].seeds.next() for _ in range(3)]
    copies.reseed(0, 7)
    assert [copies[0].seeds.next() for _ in range(3)] == first


def test_failures_in_a_row() -> None:
    copies = Copies(1)
    copies.begin(0, None)
    assert [copies.failed(0, not_forked(0)) for _ in range(2)] == [1, 2]
    copies.end(0, Usage())
    assert copies.failed(0, not_forked(0)) == 3
    copies.begin(0, None)
    copies.end(0, Usage())
    assert copies.failed(0, not_forked(0)) == 1
    for _ in range(1000):
        copies.log.add(np.ones(1))
    assert copies.failed(0, not_forked(0)) == 1


def test_a_branch_has_what_its_source_has() -> None:
    copies = Copies(2)
    copies.begin(0, 3)
    copies[0].attributes["x"] = 1
    copies.done[0] = True
    copies[1].must_fork = True
    copies[1].early = EarlyEpisode(1, {})
    copies.branched(0, 1)
    target = copies[1]
    assert target.attributes == {"x": 1} and target.attributes is not copies[0].attributes
    assert target.was_reset and not target.must_fork and target.early is None and copies.done[1]


def test_new_forks_and_lost_copies_have_nothing_pending() -> None:
    copies = Copies(2)
    for index in range(2):
        copies[index].must_fork = True
        copies[index].early = EarlyEpisode(None, {})
    copies.forked(0)
    assert not copies[0].must_fork and copies[0].early is None
    copies.dropped()
    assert not copies[1].must_fork and copies[1].early is None
