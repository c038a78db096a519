"""Names under our prefixes: which are known, and what is said about the others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sm70_moe.settings.variables import (
    FLAGS,
    KNOWN_NAMES,
    RETIRED,
    SETTINGS,
    Notice,
    NoticeKind,
    Retired,
    is_container_name,
    is_foreign,
    is_ours,
    nearest_name,
    report_names,
)

DOCS = Path(__file__).parents[2] / "docs" / "settings.md"


def test_the_known_names_are_these() -> None:
    """The interface that operators have already exported, and our own name beside each."""
    assert sorted(KNOWN_NAMES) == [
        "SM70_MOE_ASSUME",
        "SM70_MOE_BATCHED_BANKS",
        "SM70_MOE_BUILD_KERNELS",
        "SM70_MOE_CACHE",
        "SM70_MOE_COMPACT_METADATA",
        "SM70_MOE_DEPENDENT_LAUNCH",
        "SM70_MOE_FUSED_DECODE",
        "SM70_MOE_GROUPED_BATCH",
        "SM70_MOE_GROUPED_DECODE",
        "SM70_MOE_INDEXED_PREFILL",
        "SM70_MOE_JOURNAL",
        "SM70_MOE_KERNELS",
        "SM70_MOE_KERNEL_CACHE",
        "SM70_MOE_LAYER_ALLOWLIST",
        "SM70_MOE_LAYER_DENYLIST",
        "SM70_MOE_LEGACY_SINGLE_TOKEN",
        "SM70_MOE_MODEL_TYPES",
        "SM70_MOE_NATIVE_PREFILL",
        "SM70_MOE_PERSISTENT_MAX_TOKENS",
        "SM70_MOE_POLICY",
        "SM70_MOE_PROOF",
        "SM70_MOE_QPN_M1",
        "SM70_MOE_STRICT",
        "SM70_MOE_TAKE",
        "SM70_MOE_TUNE_SMALL_SHAPES",
        "VLLM_SM70_AWQ_MOE_BATCHED_GEMM",
        "VLLM_SM70_AWQ_MOE_BATCHED_LAYER_ALLOWLIST",
        "VLLM_SM70_AWQ_MOE_BATCHED_LAYER_DENYLIST",
        "VLLM_SM70_AWQ_MOE_COMPACT_METADATA",
        "VLLM_SM70_AWQ_MOE_LEGACY_SINGLE_TOKEN_COMPACT",
        "VLLM_SM70_AWQ_MOE_PERSISTENT_MAX_TOKENS",
        "VLLM_SM70_AWQ_QWEN38_MOE_COMPACT_GROUPED_DECODE",
        "VLLM_SM70_AWQ_QWEN38_MOE_INDEXED_PREFILL",
        "VLLM_SM70_AWQ_QWEN38_QPN_M1",
        "VLLM_SM70_AWQ_TUNE_SMALL_SHAPES",
    ]


def test_every_name_belongs_to_one_row() -> None:
    """No variable means two things."""
    names = [name for row in (*SETTINGS, *FLAGS) for name in row.names]
    assert len(names) == len(set(names))


def test_the_documentation_lists_exactly_the_known_names() -> None:
    """Tables of docs/settings.md against the tables of the package: names, meanings and defaults."""
    rows = re.findall(r"^\| (`[A-Z].*?) \| (.*?) \| (.*?) \|$", DOCS.read_text(encoding="utf-8"), re.MULTILINE)
    documented = [(tuple(re.findall("`(.*?)`", names)), meaning, default) for names, meaning, default in rows]
    assert documented == [(row.names, row.meaning, row.default) for row in (*FLAGS, *SETTINGS)]


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("SM70_MOE_X", True),
        ("VLLM_SM70_X", True),
        ("sm70_moe_strict", True),
        ("Vllm_Sm70_x", True),
        ("SM70_MOEX", False),
        ("VLLM_SM7", False),
        ("VLLM_USE_V1", False),
        ("MY_SM70_MOE_X", False),
    ],
)
def test_which_names_are_ours(name: str, ours: bool) -> None:
    """Wrong case is still ours, so that it can be reported."""
    assert is_ours(name) is ours


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("SM70_MOE_STRICTT", "SM70_MOE_STRICT"),
        ("SM70_MOE_STRIKT", "SM70_MOE_STRICT"),
        ("sm70_moe_strict", "SM70_MOE_STRICT"),
        ("SM70_MOE_DENYLIST", "SM70_MOE_LAYER_DENYLIST"),
        ("VLLM_SM70_AWQ_QWEN38_QPN_M2", "VLLM_SM70_AWQ_QWEN38_QPN_M1"),
        ("VLLM_SM70_AWQ_QWEN_QPN_M1", "VLLM_SM70_AWQ_QWEN38_QPN_M1"),
        ("VLLM_SM70_AWQ_MOE_COMPACT_GROUPED_DECODE", "VLLM_SM70_AWQ_QWEN38_MOE_COMPACT_GROUPED_DECODE"),
        ("VLLM_SM70_AWQ_MOE_BATCHED_LAYERS_DENYLIST", "VLLM_SM70_AWQ_MOE_BATCHED_LAYER_DENYLIST"),
        ("VLLM_SM70_STRICT", "SM70_MOE_STRICT"),
        ("SM70_MOE_BANANA", None),
        ("SM70_MOE_", None),
    ],
)
def test_the_nearest_name(name: str, nearest: str | None) -> None:
    """A misspelling finds what was meant; something far off finds nothing."""
    assert nearest_name(name, KNOWN_NAMES) == nearest


def test_of_two_names_that_are_as_near_the_one_with_our_prefix_is_meant() -> None:
    """Both prefixes are ours, and what follows is the same; nothing is near where nothing is known."""
    both = ["SM70_MOE_TUNE", "VLLM_SM70_TUNE"]
    assert nearest_name("SM70_MOE_TUNES", both) == "SM70_MOE_TUNE"
    assert nearest_name("VLLM_SM70_TUNES", both) == "VLLM_SM70_TUNE"
    assert nearest_name("SM70_MOE_TUNE", []) is None


def test_how_near_is_near() -> None:
    """Six letters of ten, counted in both, are enough."""
    assert nearest_name("SM70_MOE_ABCDE", ["SM70_MOE_ABCXY"]) == "SM70_MOE_ABCXY"  # 2 x 3 of 5 + 5
    assert nearest_name("SM70_MOE_ABCDE", ["SM70_MOE_ABXYZ"]) is None


@pytest.mark.parametrize(
    ("name", "container"),
    [
        ("SM70_MOE_SERVICE_HOST", True),
        ("SM70_MOE_SERVICE_PORT", True),
        ("SM70_MOE_SERVICE_PORT_HTTP", True),
        ("SM70_MOE_PORT", True),
        ("SM70_MOE_PORT_80_TCP", True),
        ("SM70_MOE_PORT_80_TCP_ADDR", True),
        ("SM70_MOE_PORT_80_TCP_PORT", True),
        ("SM70_MOE_PORT_8080_UDP_PROTO", True),
        ("SM70_MOE_API_SERVICE_HOST", True),
        ("VLLM_SM70_WORKER_PORT_80_TCP", True),
        ("SM70_MOE_REPORT", False),
        ("SM70_MOE_PORT_HTTP", False),
        ("SM70_MOE_SERVICE", False),
        ("SM70_MOE_STRICT", False),
    ],
)
def test_names_of_container_platforms(name: str, container: bool) -> None:
    """Names that a platform derives from a service called sm70-moe are told from ours."""
    assert is_container_name(name) is container


@pytest.mark.parametrize(
    ("name", "foreign"),
    [
        # the fork 1Cat-vLLM reads these: the nearest that it has to ours, and others
        ("VLLM_SM70_FP8_MOE_BATCHED_GEMM", True),
        ("VLLM_SM70_FP8_TUNE_SMALL_SHAPES", True),
        ("VLLM_SM70_AWQ_MOE_TUNE_MAX_TOKENS", True),
        ("VLLM_SM70_MXFP4_MOE_COMPACT_GROUPED_DECODE", True),
        ("VLLM_SM70_TRACE", True),
        ("VLLM_SM70_", True),
        # near misses of ours: letters, case, the prefix
        ("VLLM_SM70_AWQ_MOE_BATCHED_GEM", False),
        ("VLLM_SM70_AWQ_QWEN38_QPN_M2", False),
        ("VLLM_SM70_AWQ_QWEN3_QPN_M", False),
        ("vllm_sm70_awq_qwen38_qpn_m1", False),
        ("VLLM_SM70_QPN_M1", False),
        ("VLLM_SM70_MOE_STRICT", False),
        # under our own prefix everything is ours
        ("SM70_MOE_BANANA", False),
    ],
)
def test_names_of_the_engine_s_own(name: str, foreign: bool) -> None:
    """An engine's hundreds of variables draw no word; a misspelling of ours does."""
    assert is_foreign(name, KNOWN_NAMES) is foreign
    told = [notice.name for notice in report_names([name], KNOWN_NAMES, ())]
    assert told == ([] if foreign else [name])


@pytest.mark.parametrize(
    ("name", "foreign"),
    [("ABCDEFGHIJXY", False), ("ABCDEFGHIXYZ", True), ("ABCDEFGHIJ", False), ("ABCDEFGHIJKLMNO", True)],
)
def test_two_letters_of_twelve_are_a_misspelling(name: str, foreign: bool) -> None:
    """Of the shortest name that is no word: two changed or left out, not three changed or added."""
    assert is_foreign(f"VLLM_SM70_{name}", ["SM70_MOE_ABCDEFGHIJKL"]) is foreign


def test_in_eleven_letters_none_is_wrong() -> None:
    """Shorter names are words."""
    assert is_foreign("VLLM_SM70_ABCDEFGHIJX", ["SM70_MOE_ABCDEFGHIJK"])
    assert not is_foreign("VLLM_SM70_ABCDEFGHIJK", ["SM70_MOE_ABCDEFGHIJK"])


def test_notices_of_every_kind() -> None:
    """Unknown and retired names each get a notice, container names share the last one."""
    retired = [
        Retired("SM70_MOE_FAST", "0.2.0", "SM70_MOE_QPN_M1"),
        Retired("SM70_MOE_GONE", "0.3.0"),
    ]
    names = [
        "SM70_MOE_STRICT",
        "SM70_MOE_STRIKT",
        "SM70_MOE_FAST",
        "SM70_MOE_GONE",
        "SM70_MOE_SERVICE_HOST",
        "SM70_MOE_PORT_80_TCP",
        "SM70_MOE_BANANA",
    ]
    assert report_names(names, KNOWN_NAMES, retired) == (
        Notice(NoticeKind.UNKNOWN, ("SM70_MOE_BANANA",)),
        Notice(NoticeKind.RETIRED, ("SM70_MOE_FAST",), "SM70_MOE_QPN_M1", "0.2.0"),
        Notice(NoticeKind.RETIRED, ("SM70_MOE_GONE",), None, "0.3.0"),
        Notice(NoticeKind.UNKNOWN, ("SM70_MOE_STRIKT",), "SM70_MOE_STRICT"),
        Notice(NoticeKind.CONTAINER, ("SM70_MOE_PORT_80_TCP", "SM70_MOE_SERVICE_HOST")),
    )


@pytest.mark.parametrize(
    ("notice", "words"),
    [
        (Notice(NoticeKind.UNKNOWN, ("SM70_MOE_A",), "SM70_MOE_B"), ["SM70_MOE_A", "SM70_MOE_B"]),
        (Notice(NoticeKind.UNKNOWN, ("SM70_MOE_A",)), ["SM70_MOE_A"]),
        (Notice(NoticeKind.RETIRED, ("SM70_MOE_A",), "SM70_MOE_B", "0.2.0"), ["SM70_MOE_A", "SM70_MOE_B", "0.2.0"]),
        (Notice(NoticeKind.RETIRED, ("SM70_MOE_A",), None, "0.2.0"), ["SM70_MOE_A", "0.2.0"]),
        (Notice(NoticeKind.CONTAINER, ("SM70_MOE_PORT", "SM70_MOE_X_PORT")), ["2", "SM70_MOE_PORT"]),
    ],
)
def test_a_notice_names_what_it_is_about(notice: Notice, words: list[str]) -> None:
    """The line for a person holds the names and the release."""
    assert all(word in notice.text for word in words)


def test_a_known_name_that_looks_like_a_container_name_is_known() -> None:
    """A policy may name a flag as it likes."""
    assert report_names(["SM70_MOE_X_PORT"], {"SM70_MOE_X_PORT"}, ()) == ()


def test_no_retired_name_is_still_known() -> None:
    """A name cannot be both in use and gone."""
    assert not KNOWN_NAMES & {r.name for r in RETIRED}
