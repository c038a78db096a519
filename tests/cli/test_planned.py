"""What a policy's plan takes on a GPU that is not there."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sm70_moe.cli.measured import geometry_of
from sm70_moe.cli.planned import Planned, planned_on
from sm70_moe.kernels.declared import FUSED
from sm70_moe.layout import Metadata
from sm70_moe.policy import load_policy

FIRST, LARGE_GROUPS = "qwen3.8-flash-next-awq-tp4", "qwen3-30b-a3b-awq-tp4"


def planned(name: str, architecture: str) -> Planned:
    policy = load_policy(name)
    return planned_on(policy, architecture, geometry_of(policy))


@pytest.mark.parametrize("architecture", ["sm_70", "sm_90"])
@pytest.mark.parametrize(
    ("name", "one", "option"),
    [
        (FIRST, True, True),
        ("qwen3-next-80b-a3b-awq-tp4", True, True),
        ("sample-awq-tp2", True, True),
        (LARGE_GROUPS, True, False),
    ],
)
def test_shipped_policies(name: str, one: bool, option: bool, architecture: str) -> None:
    """All make 3-byte banks; one token has a native route where the policy has one, more have it everywhere."""
    found = planned(name, architecture)
    assert (found.metadata, found.why) == (Metadata.THREE_BYTE, "compact_metadata is auto")
    assert (found.unpredicted(1) == "") is one
    assert [found.unpredicted(tokens) for tokens in (2, 4, 8)] == ["", "", ""]
    assert found.has_option(FUSED) is option


def test_other_gpus_have_the_route_of_any_layer() -> None:
    """The contract names the architectures of its own routes; `native_decode` asks for its kernels only."""
    found = planned(FIRST, "sm_80")
    assert [found.unpredicted(tokens) for tokens in (1, 4, 8)] == ["", "", ""]
    assert found.unpredicted(9) == "grouped_batch takes it, whose kernels are not modelled"


def test_routes_are_options_of_nothing() -> None:
    """A route's name is no option's, nor is one that the policy does not have."""
    assert not planned(FIRST, "sm_70").has_option("qpn_m1")
    assert not planned(FIRST, "sm_70").has_option("nothing")


def test_no_torch() -> None:
    """Deciding needs none."""
    code = (
        "import sys; from sm70_moe.cli.measured import geometry_of; from sm70_moe.cli.planned import planned_on; "
        "from sm70_moe.policy import load_policy; import sm70_moe.cli.predict; "
        f"p = load_policy({FIRST!r}); planned_on(p, 'sm_70', geometry_of(p)); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
