# SPDX-License-Identifier: Apache-2.0
"""The static rectangles on which every forward runs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from freewheel.errors import ConfigError

MAX_DEPTH = 7
"""Drafts a round may write; the verifying rectangle is one wider."""

MAX_VERIFY_WIDTH = MAX_DEPTH + 1
"""Rectangles up to this width verify drafts; a wider one only computes prompts."""

MAX_LAG = 15
"""Positions by which a drafter may stay behind `computed`, where rounds without drafts pass it by:
it reads them together with the sixteenth."""


ADJUSTS, REPORTS, ECHOES = 1, 2, 3
"""Values of `StepShape.extras`. Each includes those below it."""


@dataclass(frozen=True, order=True)
class StepShape:
    """`batch` rows of `width` query tokens, then `depth` drafts: the key of a graph.

    `extras`: what the round does for requests that ask for more than a filtered choice. 0: nothing.
    ADJUSTS: logits pass through penalties, biases, bans and grammars. REPORTS: also,
    log-probabilities come home. ECHOES (prompts only): also those of the prompt's own tokens. What
    a shape lacks is not in its graph, so a batch in which nobody asks for it pays nothing.
    `tables`: the round brings a piece of a grammar's table and does nothing else. `guided`: its
    letter brings masks for rows whose grammar the host follows; such a round adjusts.
    `catches_up`: in a decoding round without drafts, the drafter reads what such rounds before it
    left for later. `shows`: the end of one prompt; the letter home says which keys its last token
    picks in each layer.
    """

    batch: int
    width: int
    depth: int
    extras: int = 0
    tables: bool = False
    guided: bool = False
    catches_up: bool = False
    shows: bool = False

    def __post_init__(self) -> None:
        if self.batch < 1 or self.width < 1:
            raise ConfigError(f"StepShape: batch and width must be at least 1, got {self}")
        if not 0 <= self.depth <= MAX_DEPTH:
            raise ConfigError(f"StepShape: depth must be 0 to {MAX_DEPTH}, got {self.depth}")
        most = REPORTS if self.width <= MAX_VERIFY_WIDTH else ECHOES
        if not 0 <= self.extras <= most:
            raise ConfigError(f"StepShape: extras must be 0 to {most}, got {self.extras}")
        if self.guided and not self.adjusts:
            raise ConfigError(f"StepShape: a guided round adjusts, got {self}")
        if self.catches_up and (self.width, self.depth) != (1, 0):
            raise ConfigError(f"StepShape: a round that catches up decodes plainly, got {self}")
        plain = self.batch == 1 and self.for_prompts and not (self.depth or self.extras)
        if self.shows and not plain:
            raise ConfigError(f"StepShape: a round that shows picks ends one prompt, got {self}")

    @property
    def adjusts(self) -> bool:
        return self.extras >= ADJUSTS

    @property
    def reports(self) -> bool:
        return self.extras >= REPORTS

    @property
    def echoes(self) -> bool:
        return self.extras >= ECHOES

    @property
    def choices(self) -> int:
        """Queries of each row whose next token is chosen.

        All of them where drafts are verified; the last certain one alone in a prompt's rectangle,
        where logits of every position would cost `width * vocabulary` floats for nothing.
        """
        return 1 if self.for_prompts else self.width

    @property
    def for_prompts(self) -> bool:
        """Too wide to verify drafts."""
        return self.width > MAX_VERIFY_WIDTH

    @property
    def lags(self) -> bool:
        """A decoding round without drafts: the drafter may leave its position for later."""
        return self.width == 1 and self.depth == 0 and not self.catches_up

    @property
    def reach(self) -> int:
        """Positions past a row's `computed` that one round may write: the rectangle and drafts."""
        return self.width + self.depth


TABLES = StepShape(1, 1, 0, tables=True)
"""The shape of rounds that bring tables."""


@dataclass(frozen=True)
class ShapeLadder:
    """Which rectangles exist.

    `decode` is ordered by depth, then batch: the last shape reaches furthest. `prefill` holds
    (batch, width) pairs ordered by width, then batch. `depth` is the draft depth of a prompt's
    round that leaves at least one row ready to decode, and of decoding rounds unless the host
    chooses another. A narrower prompt rectangle than the widest ends the prompts of all its rows
    (or it would have been wider), so only the widest exists without drafts too. `lag`: positions
    that a drafter may leave for later, where some decoding rounds draft and others do not; else 0.
    """

    decode: tuple[StepShape, ...]
    prefill: tuple[tuple[int, int], ...]
    depth: int
    lag: int = 0

    @classmethod
    def build(
        cls,
        max_batch: int,
        depth: int,
        widths: tuple[int, ...],
        prefill_batch: int,
        depths: tuple[int, ...] = (),
    ) -> ShapeLadder:
        """Powers of two up to `max_batch` rows to decode, and to `prefill_batch` at each width.

        `depths`: those among which rounds are chosen; none are: `depth` is the only one.
        """
        if not widths or list(widths) != sorted(set(widths)):
            raise ConfigError(f"chunk widths must be ascending and distinct, got {widths}")
        if widths[0] <= MAX_VERIFY_WIDTH:
            raise ConfigError(
                f"chunk widths must exceed {MAX_VERIFY_WIDTH} (narrower rectangles verify drafts), "
                f"got {widths[0]}"
            )
        batches = _powers_of_two(max_batch)
        every = sorted({depth, *depths})
        return cls(
            decode=tuple(
                StepShape(batch, 1 + drafts, drafts) for drafts in every for batch in batches
            ),
            prefill=tuple(
                (batch, width) for width in widths for batch in _powers_of_two(prefill_batch)
            ),
            depth=depth,
            lag=MAX_LAG if len(every) > 1 and every[0] == 0 else 0,
        )

    @property
    def max_batch(self) -> int:
        return self.decode[-1].batch

    @property
    def depths(self) -> tuple[int, ...]:
        """Depths of decoding rounds, ascending."""
        return tuple(sorted({shape.depth for shape in self.decode}))

    @property
    def max_prefill_batch(self) -> int:
        return max(batch for batch, _ in self.prefill)

    @property
    def max_width(self) -> int:
        return max(width for _, width in self.prefill)

    @property
    def reach(self) -> int:
        """The most positions past `computed` that any round on this ladder writes."""
        return max(shape.reach for shape in self.shapes())

    @property
    def showing(self) -> StepShape:
        """The one in which a prompt ends whose last token's picks are asked for."""
        return StepShape(1, min(width for _, width in self.prefill), 0, shows=True)

    def fit_decode(
        self, rows: int, extras: int = 0, guided: bool = False, depth: int | None = None
    ) -> StepShape:
        """The smallest decoding rectangle of at least `rows` rows. `depth`: None, the usual one."""
        drafts = self.depth if depth is None else depth
        shape = next(one for one in self.decode if one.depth == drafts and one.batch >= rows)
        if not extras and not guided:
            return shape
        return replace(shape, extras=min(extras, REPORTS), guided=guided)

    def fit_prefill(
        self, rows: int, longest: int, ready: bool, extras: int = 0, guided: bool = False
    ) -> StepShape:
        """The narrowest prompt rectangle for `longest` tokens; `ready`: some row ends its prompt.

        A prompt longer than the widest rectangle gets the widest, and goes on in the next round.
        Where no row ends its prompt, nothing is drafted whatever the depth.
        """
        width = next((w for _, w in self.prefill if w >= longest), self.max_width)
        batch = next(b for b, w in self.prefill if w == width and b >= rows)
        depth = self.depth if ready or width < self.max_width else 0
        return StepShape(batch, width, depth, extras, guided=guided)

    def shapes(self, extras: int = 0, guided: bool = False) -> tuple[StepShape, ...]:
        """Every rectangle, with extras up to `extras`, largest first: the order of capture.

        `guided`: also those of rounds that bring masks.
        """
        prefill = [StepShape(b, w, self.depth) for b, w in self.prefill]
        prefill += [StepShape(b, w, 0) for b, w in self.prefill if w == self.max_width]
        every = [replace(s, extras=e) for s in prefill for e in range(extras + 1)]
        every += [
            replace(s, extras=e) for s in self.decode for e in range(min(extras, REPORTS) + 1)
        ]
        every += [replace(s, catches_up=True) for s in every if self.lag and s.lags]
        every += [replace(s, guided=True) for s in every if guided and s.adjusts]
        every += [TABLES] if extras else []
        every += [self.showing] if extras >= ECHOES else []
        return tuple(sorted(set(every), key=lambda s: (-s.batch * s.width, -s.depth, -s.extras)))

    def shapes_of_one(self, prompt: int) -> tuple[StepShape, ...]:
        """What one request of `prompt` tokens runs through by itself, largest first."""
        whole, rest = divmod(prompt, self.max_width)
        chunks = {self.fit_prefill(1, rest or self.max_width, ready=True)}
        if whole > (rest == 0):
            chunks.add(self.fit_prefill(1, self.max_width, ready=False))
        return tuple(s for s in self.shapes() if s in chunks or s == self.fit_decode(1))


def _powers_of_two(largest: int) -> tuple[int, ...]:
    if largest < 1:
        raise ConfigError(f"a batch must be at least 1, got {largest}")
    powers = [1 << n for n in range(largest.bit_length()) if 1 << n < largest]
    return (*powers, largest)
