# SPDX-License-Identifier: Apache-2.0
"""Kept blocks as a tree of runs: what hangs together is found, added and cut off in one piece."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(slots=True, eq=False)
class Run:
    """Blocks that follow one another with no branch between, the first of them block `first` of
    whatever request finds it.

    `keys`, `endings`: of each block. `pages[g]`: of all blocks in turn, in a group that keeps
    everything; empty for others.
    """

    first: int
    keys: list[bytes]
    endings: list[bytes]
    pages: tuple[list[int], ...]
    parent: Run | None
    children: dict[Run, None] = field(default_factory=dict["Run", None])

    @property
    def end(self) -> int:
        """The number of the block behind the last."""
        return self.first + len(self.keys)


class Stretch(NamedTuple):
    """The first `blocks` blocks of a run."""

    run: Run
    blocks: int


@dataclass(frozen=True, eq=False, slots=True)
class Match:
    """Kept blocks that a request begins with; its length is their number."""

    keys: Sequence[bytes] = ()
    stretches: Sequence[Stretch] = ()
    each: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.keys)

    def pages(self, group: int) -> list[int]:
        """Of all of them in turn, in a group that keeps everything."""
        each, found = self.each[group] if self.each else 0, list[int]()
        for run, count in self.stretches:
            own = run.pages[group]
            found += own if count * each == len(own) else own[: count * each]
        return found


class Gone(NamedTuple):
    """Blocks that were taken out of the tree, and their pages of each group."""

    keys: list[bytes]
    pages: tuple[list[int], ...]


class RunTree:
    """Runs by the keys of their blocks. A block is here only with all that come before it.

    `leaves`: runs behind which nothing is kept, the least recently used first.
    """

    def __init__(self, each: Sequence[int]) -> None:
        """`each[g]`: pages of a block in a group that keeps everything, 0 in others."""
        self.each = tuple(each)
        self.leaves: OrderedDict[Run, None] = OrderedDict()
        self._runs: dict[bytes, Run] = {}  # in the order in which their blocks came
        self._numbers: dict[bytes, int] = {}  # of each block: how many come before it
        self._begun: dict[bytes, dict[Run, None]] = {}  # by the ending of their first block

    def __len__(self) -> int:
        return len(self._runs)

    def __contains__(self, key: bytes) -> bool:
        return key in self._runs

    def __iter__(self) -> Iterator[tuple[bytes, Run, int]]:
        """All blocks in the order in which they came: key, run, and place in the run."""
        for key, run in self._runs.items():
            yield key, run, self._numbers[key] - run.first

    def run(self, key: bytes) -> Run | None:
        """The run that holds the block."""
        return self._runs.get(key)

    def place(self, key: bytes) -> int:
        """The place in its run of a block that is here."""
        return self._numbers[key] - self._runs[key].first

    def roots(self) -> list[Run]:
        """Runs that begin where requests do."""
        return [run for run in dict.fromkeys(self._runs.values()) if run.parent is None]

    def find(self, keys: Sequence[bytes]) -> list[Stretch]:
        """As many of these blocks, a request's first ones, as are here."""
        found, at = list[Stretch](), 0
        while at < len(keys) and (run := self._runs.get(keys[at])) is not None:
            count = min(len(run.keys), len(keys) - at)
            if run.keys[count - 1] != keys[at + count - 1]:
                low = 1
                while low < count - 1:  # equal keys have equal ones before them
                    middle = (low + count) // 2
                    same = run.keys[middle - 1] == keys[at + middle - 1]
                    low, count = (middle, count) if same else (low, middle)
                found.append(Stretch(run, low))
                break
            found.append(Stretch(run, count))
            at += count
        return found

    def pages(self, run: Run, start: int, stop: int) -> tuple[list[int], ...]:
        """Of its blocks from `start` to `stop`, counted from the run's first on."""
        pairs = zip(run.pages, self.each, strict=True)
        return tuple([pages[start * each : stop * each] for pages, each in pairs])

    def add(
        self,
        at: int,
        keys: Sequence[bytes],
        endings: Sequence[bytes],
        pages: tuple[Sequence[int], ...],
    ) -> None:
        """A request's blocks from `at` on, up to the last of `keys`, none of which is here.

        `pages` are theirs alone. The block before them is here.
        """
        new, ends = list(keys[at:]), list(endings[at : len(keys)])
        parent = self._runs[keys[at - 1]] if at else None
        if parent is not None and at < parent.end:
            parent = self._split(parent, at)
        if parent is not None and not parent.children:
            run = parent
            run.keys += new
            run.endings += ends
            for own, more in zip(run.pages, pages, strict=True):
                own.extend(more)
            self.leaves.move_to_end(run)
        else:
            run = Run(at, new, ends, tuple([list(own) for own in pages]), parent)
            if parent is not None:
                parent.children[run] = None
            self._begun.setdefault(ends[0], {})[run] = None
            self.leaves[run] = None
        self._runs.update(dict.fromkeys(new, run))
        self._numbers.update(zip(new, range(at, at + len(new)), strict=True))

    def ending_with(self, ending: bytes, before: bytes | None) -> bytes | None:
        """The key of a block of this ending behind the block `before` (None: a request's first).

        The one that came last, if some differ in the token behind them.
        """
        run = None if before is None else self._runs.get(before)
        if before is not None and run is None:
            return None
        if run is not None and before is not None and run.keys[-1] != before:
            at = self.place(before) + 1
            return run.keys[at] if run.endings[at] == ending else None
        found = self._begun.get(ending)
        return next(reversed(found)).keys[0] if found else None

    @staticmethod
    def behind(run: Run, at: int) -> list[bytes]:
        """The keys of the run's blocks from `at` on, counted from its first, and of all behind."""
        found, heirs = run.keys[at:], list(run.children)
        while heirs:
            heir = heirs.pop()
            heirs += heir.children
            found += heir.keys
        return found

    def cut(self, run: Run, at: int) -> list[Gone]:
        """Take out the run's blocks from `at` on, counted from its first, and all behind them.

        What is then a leaf was used just now.
        """
        gone, heirs = [Gone(run.keys[at:], self.pages(run, at, len(run.keys)))], list(run.children)
        run.children = {}
        parent = run
        if at:
            del run.keys[at:], run.endings[at:]
            for own, each in zip(run.pages, self.each, strict=True):
                del own[at * each :]
        else:
            self._forget(run)
            parent = run.parent
            if parent is not None:
                del parent.children[run]
        if parent is not None and not parent.children:
            self.leaves[parent] = None
            self.leaves.move_to_end(parent)
        while heirs:
            heir = heirs.pop()
            heirs += heir.children
            self._forget(heir)
            gone.append(Gone(heir.keys, heir.pages))
        for keys, _ in gone:
            for key in keys:
                del self._runs[key], self._numbers[key]
        return gone

    def _split(self, run: Run, at: int) -> Run:
        """What of the run comes before block `at`, which is a run of its own from here on."""
        count = at - run.first
        head = Run(
            run.first,
            run.keys[:count],
            run.endings[:count],
            self.pages(run, 0, count),
            run.parent,
            {run: None},
        )
        alike = self._begun[head.endings[0]]
        self._begun[head.endings[0]] = {head if one is run else one: None for one in alike}
        if run.parent is not None:
            del run.parent.children[run]
            run.parent.children[head] = None
        run.pages = self.pages(run, count, len(run.keys))
        del run.keys[:count], run.endings[:count]
        run.first, run.parent = at, head
        self._begun.setdefault(run.endings[0], {})[run] = None
        self._runs.update(dict.fromkeys(head.keys, head))
        return head

    def _forget(self, run: Run) -> None:
        self.leaves.pop(run, None)
        alike = self._begun[run.endings[0]]
        del alike[run]
        if not alike:
            del self._begun[run.endings[0]]
