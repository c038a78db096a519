"""From a plan to its banks: out of the folder of prepared banks where they are there, else out of the weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sm70_moe import __version__
from sm70_moe.banks.banks import Banks
from sm70_moe.banks.cache import BankCache, Found, Key
from sm70_moe.kernels.protocol import Backend
from sm70_moe.numbers.codes import WeightSource
from sm70_moe.plan.memory import bank_shape
from sm70_moe.plan.plan import Plan
from sm70_moe.reading.loading import Counted, Progress
from sm70_moe.reading.offers import Identified, check

Warn = Callable[[Path, str], None]
"""Called with a file of prepared banks, and why it is not used or could not be written."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """Banks, and the file of the cache that they came out of; None for banks made from the weights."""

    banks: Banks
    file: Path | None = None


def key_of(plan: Plan, weights: WeightSource) -> Key | None:
    """Which banks a plan wants of these weights; None if the weights do not say whose they are."""
    admission, shape = plan.admission, bank_shape(plan.admission)
    if not isinstance(weights, Identified) or plan.layout is None or shape is None:
        return None
    facts, policy = admission.facts, admission.policy
    ranks = (facts.tensor_parallel or 1, facts.tensor_rank or 0, facts.expert_parallel or 1, facts.expert_rank or 0)
    return Key(
        layer=facts.layer,
        ranks=ranks,
        policy=f"{policy.name} {policy.digest}",
        layout=plan.layout,
        shape=shape,
        source=weights.digest,
        version=__version__,
    )


def prepare_banks(
    plan: Plan, weights: WeightSource, backend: Backend, device: str, progress: Progress | None = None
) -> Banks:
    """Banks made from the weights.

    Raises BackendError if some of the experts never arrived, CheckpointError if a file changed meanwhile.
    """
    shape = bank_shape(plan.admission)
    assert plan.layout is not None  # the caller has seen that a route runs the layer
    assert shape is not None
    source = weights if progress is None else Counted(weights, progress)
    banks = backend.prepare(source, plan.layout, shape, device)
    banks.require_complete()
    check(weights)
    return banks


def cached_banks(
    plan: Plan,
    weights: WeightSource,
    backend: Backend,
    device: str,
    cache: BankCache,
    warn: Warn,
    progress: Progress | None = None,
    distrust: str = "",
) -> Prepared:
    """Banks out of the cache; those that are not there, or not to be trusted, are made and written.

    `warn` is called once for a file that is not used, and for one that cannot be written. `distrust`
    says why a file is not to be used, whatever stands in it.
    """
    key = key_of(plan, weights)
    if key is None:
        return Prepared(prepare_banks(plan, weights, backend, device, progress))
    found = Found(None, cache.folder / key.file, distrust) if distrust else cache.load(key, device, progress)
    if found.banks is not None:
        check(weights)  # the key was that of the files as they were before
        return Prepared(found.banks, found.file)
    if found.ignored:
        warn(found.file, f"not used, {found.ignored}; prepared again from the weights")
    banks = prepare_banks(plan, weights, backend, device, progress)
    if banks.layout != key.layout or banks.shape != key.shape:
        return Prepared(banks)  # a plug-in's own
    try:
        cache.store(key, banks)
    except OSError as error:
        warn(found.file, f"not written: {error.strerror or error}")
    return Prepared(banks)
