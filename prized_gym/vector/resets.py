"""How the episodes of copies begin: in place, or in new forks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prized_gym.calls import RANDOM_STATE
from prized_gym.interface.commands import Call, Command, Fresh, Reset, Start
from prized_gym.interface.failure import Failure
from prized_gym.interface.fleet import Fleet
from prized_gym.vector.copies import Copies, EarlyEpisode
from prized_gym.vector.live_fleet import LiveFleet
from prized_gym.vector.pending import PendingReset
from prized_gym.vector.settings import Settings

Options = Sequence["dict[str, Any] | None"]
"""One of ``env.reset`` for every copy of the vector environment."""


@dataclass(frozen=True)
class Begun:
    """Episodes that have begun.

    Attributes:
        seeds: by copy, the seed of its episode.
        infos: by copy, the info of its reset, where that is not empty.
    """

    seeds: dict[int, int | None]
    infos: dict[int, dict[str, Any]]


class Resets:
    """Resets copies, in new forks where that is asked for or needed.

    Args:
        settings: when to fork, and where to reset.
        copies: what is known of the copies.
        live: their fleet.
    """

    def __init__(self, settings: Settings, copies: Copies, live: LiveFleet) -> None:
        self._settings, self._copies, self._live = settings, copies, live

    def check_options(self, options: Options) -> None:
        """Refuse options that no copy would be reset with."""
        if self._settings.from_base and any(options):
            raise ValueError(
                f"options={next(filter(None, options))} with reset_in='base': "
                "the environment was reset once, in the base, without options"
            )

    def begin(self, targets: Sequence[int], seeds: Sequence[int | None], options: Options) -> PendingReset:
        """Begin to reset the copies ``targets``; ``seeds`` and ``options`` have an entry for every copy."""
        settings, copies, fleet = self._settings, self._copies, self._live.get()
        forks: dict[int, Reset] = {}
        in_place: dict[int, Command] = {}
        going_on: list[int] = []
        begun: dict[int, int | None] = {}
        for index in targets:
            state, seed = copies[index], seeds[index]
            if seed is not None:
                copies.reseed(index, seed)
            exists = fleet.alive(index) and not state.must_fork
            if exists and state.untouched and not state.has_random_state:
                begun[index] = own = state.seeds.next() if seed is None else seed
                in_place[index] = Reset(seed, options[index], reseed=own, from_base=settings.from_base)
            elif exists and settings.fork_on == "start" and not settings.from_base:
                begun[index] = seed
                in_place[index] = Reset(seed, options[index])
            else:
                forks[index] = self.fresh(index, seed, options[index])
                begun[index] = forks[index].seed
                if seed is None and state.was_reset:
                    going_on.append(index)
                elif seed is None:
                    # Its generators are fresh: the environment is reset as it would be anywhere else.
                    forks[index].seed = None
        for index, random_state in self._random_states(fleet, going_on).items():
            fresh = forks[index].fresh
            assert fresh is not None
            fresh.random_state, forks[index].seed, begun[index] = random_state, None, None
        # The ones in place first: they work while the others are being forked.
        if in_place:
            fleet.command(in_place)
        if forks:
            self.fork(forks)
        return PendingReset(begun, options)

    def finish(self, pending: PendingReset) -> dict[int, dict[str, Any]]:
        """Finish a reset whose copies have answered; the info of each that gave one."""
        finished = self._live.inbox.take(pending.seeds)
        seeds, infos = pending.seeds, finished.infos
        if finished.failures:
            again = self.retry(finished.failures, seeds, pending.options)
            seeds, infos = {**seeds, **again.seeds}, {**infos, **again.infos}
        for index, seed in seeds.items():
            self._copies.begin(index, seed)
        self._copies.note_done()
        return infos

    def fresh(self, index: int, seed: int | None, options: dict[str, Any] | None = None) -> Reset:
        """The first command of a new fork of copy ``index``, whose episode begins with it; unseeded, from its own stream."""
        state = self._copies[index]
        own = state.seeds.next() if seed is None else seed
        fresh = Fresh(own, index, dict(state.attributes))
        return Reset(own, options, fresh=fresh, from_base=self._settings.from_base)

    def fork(self, first: Mapping[int, Command]) -> None:
        """Begin to make new forks."""
        self._live.get().fork(first)
        for index in first:
            self._copies.forked(index)

    def retry(self, failures: Mapping[int, Failure], seeds: Mapping[int, int | None], options: Options = ()) -> Begun:
        """Try resets that failed once more in fresh forks, or raise what they failed of.

        Args:
            failures: by copy.
            seeds: what their episodes were to begin with; None for the next seed of the copy's own stream.
            options: of every copy; empty for none.
        """
        self._count(failures, raising=not self._settings.truncates)
        resets = {index: self.fresh(index, seeds[index], options[index] if options else None) for index in failures}
        self.fork(resets)
        finished = self._live.wait_for(resets)
        self._count(finished.failures, raising=bool(finished.failures))
        return Begun({index: reset.seed for index, reset in resets.items()}, finished.infos)

    def _count(self, failures: Mapping[int, Failure], raising: bool) -> None:
        for index, failure in failures.items():
            self._copies.failed(index, failure)
        if raising:
            raise next(iter(failures.values())).error()

    def begin_now(self, indices: Sequence[int]) -> Begun:
        """Begin the next episode of some copies in new forks, and wait for them; others may be busy meanwhile."""
        resets = {index: self.fresh(index, None) for index in indices}
        seeds = {index: reset.seed for index, reset in resets.items()}
        self.fork(resets)
        finished = self._live.wait_for(indices)
        if not finished.failures:
            return Begun(seeds, finished.infos)
        again = self.retry(finished.failures, seeds)
        return Begun({**seeds, **again.seeds}, {**finished.infos, **again.infos})

    def ensure(self, indices: Sequence[int]) -> None:
        """See to it that copies can be asked something between their episodes.

        Those that were never reset are forked. The next episode of those that have failed begins early: the step that is to
        begin it finds it begun.
        """
        copies, fleet = self._copies, self._live.get()
        unborn = {
            index: Start(Fresh(copies[index].seeds.next(), index, dict(copies[index].attributes)))
            for index in indices
            if not copies[index].was_reset and not fleet.alive(index)
        }
        if unborn:
            self.fork(unborn)
            failures = self._live.wait_for(unborn).failures
            if failures:
                raise next(iter(failures.values())).error()
            for index in unborn:
                copies[index].untouched = True
        failed = [index for index in indices if copies[index].must_fork]
        if failed:
            begun = self.begin_now(failed)
            for index in failed:
                copies[index].early = EarlyEpisode(begun.seeds[index], begun.infos.get(index, {}))

    def _random_states(self, fleet: Fleet, indices: Sequence[int]) -> dict[int, dict[str, Any]]:
        """Where the ``np_random`` of copies that are to be replaced stands, for the new forks to go on from.

        So an unseeded reset is what it is in ``SyncVectorEnv``. A copy that died, or was never reset, has none to go on from.
        """
        if self._settings.from_base or not fleet.carries_random_state:
            return {}
        asked = [index for index in indices if fleet.alive(index)]
        if not asked:
            return {}
        fleet.command({index: Call(RANDOM_STATE) for index in asked})
        # One that does not answer is replaced like the others.
        return fleet.wait(None, self._settings.limits.reset).results
