# SPDX-License-Identifier: Apache-2.0
"""What an executor owes the other ranks, as one of three roles: alone, leading, or following."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from freewheel.runtime.parallel.channel import Channel, Order, Task, bytes_of
from freewheel.spec.shape import StepShape


class Answers(Protocol):
    """What every rank says of something."""

    @property
    def here(self) -> bool:
        """Whether `take` would wait for none."""
        ...

    def take(self) -> Tensor:
        """int64 [ranks, N, 2]: in the order of ranks. Raises RankError if one is gone."""
        ...


@dataclass(frozen=True)
class Own:
    """There is one rank."""

    parts: Tensor  # int64 [1, N, 2]

    @property
    def here(self) -> bool:
        return True

    def take(self) -> Tensor:
        return self.parts


class Peers(Protocol):
    """The other ranks of an engine. Each call comes before what it announces."""

    def at_close(self, release: Callable[[], None]) -> None:
        """Call `release`, a method, before ranks part: no graph may hold a group then."""
        ...

    def capture(self, shape: StepShape) -> None:
        """The graph of `shape` is made next: its collectives run, so all ranks make it."""
        ...

    def round(self, shape: StepShape, letter: Tensor) -> None:
        """A round of `shape` comes next, with this letter: int32 [words], on the host."""
        ...

    def copy(self, copies: Tensor) -> None:
        """Pages are copied before the next round: int64 [N, 4], on the host."""
        ...

    def replay(self, shape: StepShape) -> None:
        """The graph of `shape` runs next, on the letter that came last."""
        ...

    def mirror(self, tensors: Iterable[Tensor]) -> None:
        """The ranks' static tensors become those of rank 0."""
        ...

    def agree(self, what: str, digest: bytes) -> None:
        """Raise RankError unless every rank of this copy comes with the same digest."""
        ...

    def reads(self, own: int) -> list[int]:
        """Host reads that every rank has counted, in the order of ranks; this one `own`."""
        ...

    def move(self, words: Tensor) -> None:
        """Transfers start: int64 [N], on the host, see `spec.transfer_words`."""
        ...

    def settle(self) -> None:
        """Ranks say next which transfers have ended."""
        ...

    def files(self) -> None:
        """Ranks say next which blocks files hold."""
        ...

    def errand(self, text: str) -> None:
        """Ranks are to do something for prompts that change engines, see `spec.errand`."""
        ...

    def ask(self, own: Tensor) -> Answers:
        """What every rank says, this one `own`, int64 [N, 2]; nobody is waited for."""
        ...

    def texts(self, own: bytes) -> list[bytes]:
        """What every rank says, in the order of ranks; this one `own`."""
        ...

    def check(self) -> None:
        """Raise RankError if a rank is known to be gone."""
        ...

    def leave(self) -> None:
        """The engine is closed: the others close it too, and end if there was no other."""
        ...


class Alone:
    """There are none."""

    def at_close(self, release: Callable[[], None]) -> None: ...

    def capture(self, shape: StepShape) -> None: ...

    def round(self, shape: StepShape, letter: Tensor) -> None: ...

    def copy(self, copies: Tensor) -> None: ...

    def replay(self, shape: StepShape) -> None: ...

    def mirror(self, tensors: Iterable[Tensor]) -> None: ...

    def agree(self, what: str, digest: bytes) -> None: ...

    def reads(self, own: int) -> list[int]:
        return [own]

    def move(self, words: Tensor) -> None: ...

    def settle(self) -> None: ...

    def files(self) -> None: ...

    def errand(self, text: str) -> None: ...

    def ask(self, own: Tensor) -> Answers:
        return Own(own[None])

    def texts(self, own: bytes) -> list[bytes]:
        return [own]

    def check(self) -> None: ...

    def leave(self) -> None: ...


@dataclass(frozen=True)
class Leader:
    """Rank 0, of whose engines this is number `engine`. `gone`: raises if a rank is gone; `left`:
    has the others close an engine."""

    channel: Channel
    engine: int
    gone: Callable[[], None]
    left: Callable[[int], None]

    def at_close(self, release: Callable[[], None]) -> None:
        self.channel.at_close(release)

    def capture(self, shape: StepShape) -> None:
        self.channel.tell(Order(Task.CAPTURE, self.engine, 0, shape))

    def round(self, shape: StepShape, letter: Tensor) -> None:
        self.channel.tell(Order(Task.ROUND, self.engine, letter.nbytes, shape), letter)

    def copy(self, copies: Tensor) -> None:
        self.channel.tell(Order(Task.COPY, self.engine, copies.nbytes), copies)

    def replay(self, shape: StepShape) -> None:
        self.channel.tell(Order(Task.REPLAY, self.engine, 0, shape))

    def mirror(self, tensors: Iterable[Tensor]) -> None:
        self.channel.tell(Order(Task.MIRROR, self.engine))
        for tensor in tensors:
            self.channel.mirror(tensor)

    def agree(self, what: str, digest: bytes) -> None:
        self.channel.agree(what, digest)

    def reads(self, own: int) -> list[int]:
        self.channel.tell(Order(Task.READS, self.engine))
        return self.channel.counts(own)

    def move(self, words: Tensor) -> None:
        self.channel.tell(Order(Task.MOVE, self.engine, words.nbytes), words)

    def settle(self) -> None:
        self.channel.tell(Order(Task.SETTLE, self.engine))

    def files(self) -> None:
        self.channel.tell(Order(Task.FILES, self.engine))

    def errand(self, text: str) -> None:
        raw = bytes_of(text)
        self.channel.tell(Order(Task.ERRAND, self.engine, raw.numel()), raw)

    def ask(self, own: Tensor) -> Answers:
        return self.channel.ask(own)

    def texts(self, own: bytes) -> list[bytes]:
        return self.channel.texts(own)

    def check(self) -> None:
        self.gone()

    def leave(self) -> None:
        self.left(self.engine)


@dataclass(frozen=True)
class Follower:
    """Any other rank: what is to come was announced to it already."""

    channel: Channel

    def at_close(self, release: Callable[[], None]) -> None:
        self.channel.at_close(release)

    def capture(self, shape: StepShape) -> None: ...

    def round(self, shape: StepShape, letter: Tensor) -> None: ...

    def copy(self, copies: Tensor) -> None: ...

    def replay(self, shape: StepShape) -> None: ...

    def mirror(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self.channel.mirror(tensor)

    def agree(self, what: str, digest: bytes) -> None:
        self.channel.agree(what, digest)

    def reads(self, own: int) -> list[int]:
        return self.channel.counts(own)

    def move(self, words: Tensor) -> None: ...

    def settle(self) -> None: ...

    def files(self) -> None: ...

    def errand(self, text: str) -> None: ...

    def ask(self, own: Tensor) -> Answers:
        return self.channel.ask(own)

    def texts(self, own: bytes) -> list[bytes]:
        return self.channel.texts(own)

    def check(self) -> None: ...

    def leave(self) -> None: ...
