"""One layer on trial: every version of its kernels runs once, and all results come back and are judged together.

A proof has a few milliseconds. What takes time is not the kernels but each wait for the device and each
numpy operation, so there is one copy from the device and one judgement for all calls of all routes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf

import numpy as np
import torch

from sm70_moe.banks.banks import Banks
from sm70_moe.kernels.call import Call
from sm70_moe.kernels.native.refusal import Crash
from sm70_moe.kernels.protocol import Backend, Versioned, Workspace
from sm70_moe.numbers.codes import WeightSource
from sm70_moe.plan.plan import Plan
from sm70_moe.plan.planned import PlannedRoute
from sm70_moe.reading.offers import read_columns
from sm70_moe.reading.transfer import brought
from sm70_moe.reference.bounds import out_ratios, w13_ratios
from sm70_moe.reference.columns import Array, Columns, decoded
from sm70_moe.reference.rounding import Floats, widen

COLUMNS = 8
"""Columns of gate, up and down that are judged: one word of them."""

MOST_TOKENS = 8
"""A proof's calls are no longer than that; a route that begins later is tried at its first count."""

MOST_ROWS = 8
"""Rows of a call that are judged; of a longer one the first, the last and some between."""

FACTOR = 2.0
"""Tensor cores need not round to nearest (CONTRACT 9)."""

Parts = list[tuple[torch.Tensor, torch.Tensor]]

Ids = np.ndarray[tuple[int, int], np.dtype[np.int32]]


@dataclass(frozen=True, slots=True)
class Made:
    """Inputs of the longest call, on the device and as numbers."""

    x: torch.Tensor
    weights: torch.Tensor
    rows: Array
    factors: Array
    dtype: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """Largest bound fractions of a route over the calls that it was tried with, or what it raised."""

    tokens: tuple[int, ...]
    w13: float
    out: float
    error: str = ""


@dataclass(frozen=True, slots=True)
class Trial:
    """The calls of one route: their lengths, and for each what launches the same kernels for the same length."""

    backend: Backend
    tokens: tuple[int, ...]
    keys: tuple[tuple[int, object], ...] = ()
    error: str = ""

    def only(self, key: tuple[int, object]) -> Trial:
        """With this call alone, or with none."""
        keys = tuple(own for own in self.keys if own == key)
        return replace(self, tokens=tuple(count for count, _ in keys), keys=keys)


@dataclass(frozen=True, slots=True)
class Subject:
    """One layer, the call that it is tried with, and what must come out of some columns."""

    banks: Banks
    made: Made
    experts: tuple[int, ...]
    chosen: Ids
    ids: torch.Tensor
    inner: range
    outer: range
    columns: Columns
    versions: Versions

    @classmethod
    def of(cls, plan: Plan, banks: Banks, weights: WeightSource, made: Made, versions: Versions) -> Subject:
        index, shape, group = plan.admission.facts.index or 0, banks.shape, banks.layout.group
        experts = chosen(shape.experts, index)
        inner, outer = word(shape.intermediate, index), word(shape.hidden, index + 1)
        read = [read_columns(weights, expert, group, inner, outer) for expert in experts]
        w13 = [part for expert in read for part in (expert.gate, expert.up)]
        both = (w13, [expert.down for expert in read])
        arrays = brought(
            torch.cat([getattr(codes, name) for codes in matrices], dim=1)
            for matrices in both
            for name in ("codes", "zeros", "scales")
        )
        plain = [array.numpy() for array in arrays]
        columns = Columns(experts, decoded(group, *plain[:3]), decoded(group, *plain[3:]))
        ids = slots(experts, *made.factors.shape)
        on_device = torch.from_numpy(ids).to(banks.device)
        return cls(banks, made, experts, ids, on_device, inner, outer, columns, versions)

    def prove(
        self, routes: Sequence[tuple[PlannedRoute, Backend]], space: Workspace | None, turn: int | None = None
    ) -> tuple[Verdict, ...]:
        """Run every version that the routes can reach, and judge it. What a kernel raises is its verdict's error.

        Calls of several routes that launch the same kernels are made once. With a `turn` only one call is made,
        another one each turn; the verdict of a route that does not launch its kernels has no tokens.
        """
        trials = [self._trial(*pair) for pair in routes]
        runs = {key: trial.backend for trial in reversed(trials) for key in trial.keys}
        if turn is not None and runs:
            only = list(runs)[turn % len(runs)]
            runs = {only: runs[only]}
            trials = [trial.only(only) for trial in trials]
        results = Results.empty(self, [tokens for tokens, _ in runs])
        parts = results.split(results.buffer)
        errors: dict[object, str] = {}
        for number, (key, backend) in enumerate(runs.items()):
            call = results.call(number, parts)
            if error := attempted(partial(backend.run, self.banks, call, space)):
                errors[key] = error
        found: dict[object, tuple[float, float]] = {}
        lost = attempted(lambda: found.update(zip(runs, results.judged(), strict=True)))
        return tuple(self._verdict(trial, found, errors, lost) for trial in trials)

    def _trial(self, route: PlannedRoute, backend: Backend) -> Trial:
        made: list[Trial] = []

        def ask() -> None:
            keys = self.versions.keys(route, backend, self.banks, self.ids.shape[1])
            made.append(Trial(backend, tuple(count for count, _ in keys), keys))

        error = attempted(ask)
        return made[0] if made else Trial(backend, (route.tokens.first,), error=error)

    @staticmethod
    def _verdict(
        trial: Trial, found: dict[object, tuple[float, float]], errors: dict[object, str], lost: str
    ) -> Verdict:
        error = trial.error or next((errors[key] for key in trial.keys if key in errors), lost)
        if error:
            return Verdict(trial.tokens, inf, inf, error)
        if not trial.keys:
            return Verdict((), 0.0, 0.0)
        w13, out = np.max([found[key] for key in trial.keys], axis=0)  # NaN among them stays NaN, and is not ok
        return Verdict(trial.tokens, float(w13), float(out))


@dataclass(frozen=True, slots=True)
class Results:
    """Outputs of all calls in one buffer, NaN at first: activations (M, k, I) and output (M, H) of each."""

    subject: Subject
    lengths: tuple[int, ...]
    buffer: torch.Tensor

    @classmethod
    def empty(cls, subject: Subject, lengths: Iterable[int]) -> Results:
        every, x = tuple(lengths), subject.made.x
        sizes = [sum(_sizes(subject, tokens)) for tokens in every]
        return cls(subject, every, x.new_full((sum(sizes),), torch.nan))

    def call(self, number: int, parts: Parts) -> Call:
        tokens, made = self.lengths[number], self.subject.made
        inner, out = parts[number]
        return Call(made.x[:tokens], self.subject.ids[:tokens], made.weights[:tokens], out, inner)

    def judged(self) -> Iterator[tuple[float, float]]:
        """Largest bound fractions of each call: of the activations' columns, and of the output's, W2 on the
        call's own activations."""
        subject, parts = self.subject, self.split(self.buffer.cpu())
        rows = [judged(tokens) for tokens in self.lengths]
        # NaN in the activations would make the expected output NaN too: it is looked for in all of both, where they are
        clean = not self.buffer.isnan().any()
        whole = [clean or not (inner.isnan().any() or out.isnan().any()) for inner, out in parts]
        given = np.concatenate([numbers(some(inner, at)) for (inner, _), at in zip(parts, rows, strict=True)])
        outer = slice(subject.outer.start, subject.outer.stop)
        out = np.concatenate([numbers(some(out, at)[:, outer]) for (_, out), at in zip(parts, rows, strict=True)])
        tokens = np.concatenate(rows)
        seen, place = np.unique(tokens, return_inverse=True)  # of a long call's rows few are judged
        factors = subject.made.factors[tokens]
        with np.errstate(all="ignore"):
            expected = subject.columns.of(subject.made.rows[seen], subject.made.dtype)
            answer = expected.answer(place, subject.chosen[tokens], factors, given)
            w13 = w13_ratios(answer, given[:, :, subject.inner.start : subject.inner.stop], FACTOR)
            last = out_ratios(answer, out, factors, FACTOR)
        ends = np.cumsum([len(at) for at in rows])
        for end, at, complete in zip(ends, rows, whole, strict=True):
            own = slice(end - len(at), end)
            yield (float(w13[own].max()), float(last[own].max())) if complete else (inf, inf)

    def split(self, buffer: torch.Tensor) -> Parts:
        """Activations and output of each call."""
        top_k, shape = self.subject.ids.shape[1], self.subject.banks.shape
        sizes = [size for tokens in self.lengths for size in _sizes(self.subject, tokens)]
        parts = torch.split(buffer, sizes)
        inner = [part.view(-1, top_k, shape.intermediate) for part in parts[::2]]
        return list(zip(inner, [part.view(-1, shape.hidden) for part in parts[1::2]], strict=True))


def _sizes(subject: Subject, tokens: int) -> tuple[int, int]:
    """Elements of a call's activations and of its output."""
    shape = subject.banks.shape
    return tokens * subject.ids.shape[1] * shape.intermediate, tokens * shape.hidden


def attempted(run: Callable[[], None]) -> str:
    """What foreign code (a driver, a plug-in) raised, or nothing."""
    try:
        run()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return str(Crash.of(error))
    return ""


def some(tensor: torch.Tensor, rows: Array) -> torch.Tensor:
    """Some rows; torch's own indexing by a list starts threads, which takes longer than all else."""
    return tensor if len(rows) == len(tensor) else torch.stack([tensor[row] for row in rows.tolist()])


def numbers(tensor: torch.Tensor) -> Floats:
    return widen(tensor.float().numpy())


def judged(tokens: int) -> Array:
    """The rows of a call that are judged."""
    return np.unique(np.linspace(0, tokens - 1, min(tokens, MOST_ROWS)).astype(int))


def chosen(experts: int, index: int) -> tuple[int, ...]:
    """Two experts, others in each layer: what a proof costs is mostly their decoding in FP64."""
    return tuple(dict.fromkeys((index % experts, (37 * index + experts // 2) % experts)))


def word(size: int, index: int) -> range:
    """One word of columns, another one in each layer."""
    start = (5 * index) % max(1, size // COLUMNS) * COLUMNS
    return range(start, start + COLUMNS)


def slots(experts: tuple[int, ...], tokens: int, top_k: int) -> Ids:
    """Ids (M, k): the experts in turn, a few twice in a row, and one slot without any where there are several."""
    ids = np.resize(np.array(experts, np.int32), (tokens, top_k))
    if top_k > 1:
        ids[0, -1] = -1
    return ids


@dataclass(slots=True)
class Versions:
    """The kernels that backends launch for calls of each length; asked once for all layers of one kind."""

    _known: dict[tuple[object, ...], tuple[Backend, tuple[object, ...]]] = field(default_factory=dict)

    def keys(self, route: PlannedRoute, backend: Backend, banks: Banks, top_k: int) -> tuple[tuple[int, object], ...]:
        """Token counts at which a route launches other kernels than at fewer tokens, with what tells them apart."""
        first, last = route.tokens.first, route.tokens.last
        counts = range(first, max(first, min(last or MOST_TOKENS, MOST_TOKENS)) + 1)
        asked = (id(backend), counts, banks.shape, banks.layout, banks.device, top_k)
        if asked not in self._known:
            self._known[asked] = (backend, _names(backend, banks, top_k, counts))  # held, so that its id stays its own
        names = self._known[asked][1]
        most = dict(zip(names, counts, strict=True))  # the most tokens of each set of kernels
        tried = sorted({counts[0], *most.values()})
        return tuple((tokens, names[tokens - first]) for tokens in tried)


def _names(backend: Backend, banks: Banks, top_k: int, counts: range) -> tuple[object, ...]:
    if not isinstance(backend, Versioned):
        return (backend.name,) * len(counts)
    return tuple(backend.version(banks, top_k, tokens) or backend.name for tokens in counts)
