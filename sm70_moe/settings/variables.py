"""The names that this package reads, and what is said about names that it does not know.

A variable under one of our prefixes that nothing reads is a misspelling, a leftover or a container
platform's own; each is reported, because a flag that silently does nothing looks like a flag that works.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from difflib import SequenceMatcher
from enum import StrEnum

OWN_PREFIX = "SM70_MOE_"
PREFIXES = (OWN_PREFIX, "VLLM_SM70_")


def own_name(feature: str) -> str:
    """The variable that every feature has besides those its policy lists."""
    return OWN_PREFIX + feature.upper()


def is_ours(name: str) -> bool:
    """Whether a variable lies under our prefixes; wrong case counts, so that it can be reported."""
    return name.upper().startswith(PREFIXES)


@dataclass(frozen=True, slots=True)
class Known:
    """One setting or flag with all its variables; the first name is the one to recommend."""

    setting: str
    names: tuple[str, ...]
    meaning: str
    default: str


SETTINGS = (
    Known(
        "policy",
        ("SM70_MOE_POLICY",),
        "Name of a shipped policy, path of a policy file, or a folder of policies beside the shipped ones.",
        "by geometry",
    ),
    Known("journal", ("SM70_MOE_JOURNAL",), "Path of the decision journal.", "no journal"),
    Known("cache", ("SM70_MOE_CACHE",), "Folder of prepared banks, read and written.", "no cache"),
    Known("strict", ("SM70_MOE_STRICT",), "`1`: unknown and retired variables are errors.", "`0`"),
    Known(
        "layer_allow",
        ("SM70_MOE_LAYER_ALLOWLIST", "VLLM_SM70_AWQ_MOE_BATCHED_LAYER_ALLOWLIST"),
        "The only layers that may get batched banks, and the routes that need them.",
        "all layers",
    ),
    Known(
        "layer_deny",
        ("SM70_MOE_LAYER_DENYLIST", "VLLM_SM70_AWQ_MOE_BATCHED_LAYER_DENYLIST"),
        "Layers that stay on the older route; wins over the allow list.",
        "no layer",
    ),
    Known(
        "persistent_tokens",
        ("SM70_MOE_PERSISTENT_MAX_TOKENS", "VLLM_SM70_AWQ_MOE_PERSISTENT_MAX_TOKENS"),
        "Tokens that resident scratch is sized for, 1 to 32.",
        "`0` (derive)",
    ),
    Known(
        "kernels",
        ("SM70_MOE_KERNELS",),
        "Folder with native kernels that `build-kernels` made.",
        "the package's own kernels",
    ),
    Known(
        "kernel_cache",
        ("SM70_MOE_KERNEL_CACHE",),
        "Folder of kernels that are compiled on this machine; `0`: none are compiled.",
        "`1` (`~/.cache/sm70-moe/kernels`)",
    ),
    Known(
        "proof",
        ("SM70_MOE_PROOF",),
        "`0`: native routes are not tried on each layer's own banks when it is loaded.",
        "`1`",
    ),
    Known(
        "assume",
        ("SM70_MOE_ASSUME",),
        "`plain-silu`: what is not known of a layer's arithmetic is taken to be that; what is known stays.",
        "nothing is assumed",
    ),
    Known(
        "take",
        ("SM70_MOE_TAKE",),
        "Of layers that an engine could run: `native` takes those with native routes for all calls; `all`; `none`.",
        "`native`",
    ),
    Known(
        "model_types",
        ("SM70_MOE_MODEL_TYPES",),
        "File that says what model types compute, before the package's own table.",
        "the package's table",
    ),
    Known(
        "dependent_launch",
        ("SM70_MOE_DEPENDENT_LAUNCH",),
        "`0`: kernels of one call never overlap; matters on sm_90 and later.",
        "`1`",
    ),
)

BUILD_NAMES = ("SM70_MOE_BUILD_KERNELS",)
"""Read when the package is built, and by nothing that is installed: known, so that nobody is warned."""


def flag_row(feature: str, name: str, meaning: str, default: str = "auto") -> Known:
    return Known(feature, (name, own_name(feature)), meaning, default)


FLAGS = (
    flag_row("qpn_m1", "VLLM_SM70_AWQ_QWEN38_QPN_M1", "The native single-token kernel."),
    flag_row(
        "grouped_decode",
        "VLLM_SM70_AWQ_QWEN38_MOE_COMPACT_GROUPED_DECODE",
        "The active-expert grouped kernel, 2 to 8 tokens.",
    ),
    flag_row(
        "indexed_prefill",
        "VLLM_SM70_AWQ_QWEN38_MOE_INDEXED_PREFILL",
        "The indexed prefill route, 128 tokens and more.",
    ),
    flag_row(
        "legacy_single_token",
        "VLLM_SM70_AWQ_MOE_LEGACY_SINGLE_TOKEN_COMPACT",
        "The older single-token route; interleaves W13, and `qpn_m1` needs it.",
    ),
    flag_row(
        "batched_banks",
        "VLLM_SM70_AWQ_MOE_BATCHED_GEMM",
        "All experts of a layer in one bank; the routes above need it.",
    ),
    flag_row("compact_metadata", "VLLM_SM70_AWQ_MOE_COMPACT_METADATA", "3-byte instead of 4-byte group metadata."),
    flag_row(
        "tune_small_shapes",
        "VLLM_SM70_AWQ_TUNE_SMALL_SHAPES",
        "Measure tactics for small shapes; broader than one contract.",
        "off",
    ),
    Known(
        "grouped_batch",
        (own_name("grouped_batch"),),
        "The native kernels for 9 to 127 tokens.",
        "auto",
    ),
    Known(
        "native_prefill",
        (own_name("native_prefill"),),
        "The native kernels for 128 tokens and more, where `indexed_prefill` is not the model's.",
        "auto",
    ),
    Known(
        "fused_decode",
        (own_name("fused_decode"),),
        "`qpn_m1` in one launch instead of two; needs a cooperative launch.",
        "off",
    ),
)
"""The flags of the shipped policies. Another policy may declare more."""

KNOWN_NAMES = frozenset({*BUILD_NAMES, *(name for row in (*SETTINGS, *FLAGS) for name in row.names)})


@dataclass(frozen=True, slots=True)
class Retired:
    """A name that an earlier release read; `instead` is what does its work now, if anything."""

    name: str
    since: str
    instead: str | None = None


RETIRED: tuple[Retired, ...] = ()
"""No release has retired a name yet."""


class NoticeKind(StrEnum):
    """Why a variable is reported."""

    UNKNOWN = "unknown"
    RETIRED = "retired"
    CONTAINER = "container"  # set by a container platform for a service named like us


@dataclass(frozen=True, slots=True)
class Notice:
    """Variables under our prefixes that nothing reads.

    One notice a name, except for container platforms: one for all of theirs. `nearest` is the known
    name that was probably meant.
    """

    kind: NoticeKind
    names: tuple[str, ...]
    nearest: str | None = None
    since: str | None = None

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def text(self) -> str:
        """One line for a person."""
        if self.kind is NoticeKind.CONTAINER:
            return f"{len(self.names)} variables of a container platform are ignored, {self.name} for one"
        if self.kind is NoticeKind.RETIRED:
            instead = f"use {self.nearest}" if self.nearest else "nothing replaces it"
            return f"{self.name} was retired in {self.since} and has no effect; {instead}"
        return f"{self.name} is not known and has no effect" + (f"; nearest is {self.nearest}" if self.nearest else "")


CONTAINER_NAME = re.compile(
    r"""_(SERVICE_HOST
        |SERVICE_PORT(_[A-Z0-9_]+)?
        |PORT(_[0-9]+_(TCP|UDP|SCTP)(_(ADDR|PORT|PROTO))?)?
        )""",
    re.VERBOSE,
)
"""The end of a name that Kubernetes or Docker derives from a service's name."""


def is_container_name(name: str) -> bool:
    """Whether some tail of the name is one that a container platform makes up."""
    return any(CONTAINER_NAME.fullmatch(name, match.start()) for match in re.finditer("_", name))


NEAR = 0.6
"""Share of matching letters, prefix left out, below which a name is no likely misspelling."""


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """The known name most like this one, or None; prefixes do not count, they would swamp the rest."""
    wanted = tail(name.upper())
    scored = [(SequenceMatcher(None, wanted, tail(k.upper())).ratio(), k[:4] == name[:4], k) for k in sorted(known)]
    score, _, best = max(scored, default=(0.0, False, ""))
    return best if score >= NEAR else None


def tail(name: str) -> str:
    """A name without our prefix."""
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return name


EDITS = 2
"""Letters that a misspelt name of ours has wrong, at most. In names shorter than `LONG`, none: they are words."""

LONG = 12


def is_foreign(name: str, known: Iterable[str]) -> bool:
    """Whether a name under an engine's prefix is that engine's own: no name of ours, nor nearly one.

    The engines that the product lives in have hundreds of their own; nothing is said of those.
    """
    upper = name.upper()
    return not upper.startswith(OWN_PREFIX) and not any(misspells(tail(upper), tail(k.upper())) for k in known)


def misspells(given: str, meant: str) -> bool:
    given, meant = given.removeprefix("MOE_"), meant.removeprefix("MOE_")
    return given == meant or (len(meant) >= LONG and edits(given, meant) <= EDITS)


def edits(a: str, b: str) -> int:
    """Letters to insert, delete or replace; more than `EDITS` where the lengths say so."""
    if abs(len(a) - len(b)) > EDITS:
        return EDITS + 1
    row = list(range(len(b) + 1))
    for i, letter in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, other in enumerate(b, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (letter != other))
    return row[-1]


def report_names(names: Iterable[str], known: Collection[str], retired: Iterable[Retired]) -> tuple[Notice, ...]:
    """What to say about the names that were given: retired and unknown ones each, container ones together.

    Nothing of an engine's own.
    """
    gone = {r.name: r for r in retired}
    found: list[Notice] = []
    container: list[str] = []
    for name in sorted(set(names) - set(known)):
        if name in gone:
            found.append(Notice(NoticeKind.RETIRED, (name,), gone[name].instead, gone[name].since))
        elif is_container_name(name):
            container.append(name)
        elif not is_foreign(name, known):
            found.append(Notice(NoticeKind.UNKNOWN, (name,), nearest_name(name, known)))
    if container:
        found.append(Notice(NoticeKind.CONTAINER, tuple(container)))
    return tuple(found)
