"""Policies: what a layer must be, which flags decide over it, and which route takes which call.

A policy is a TOML file. Loading reports all of its problems at once; what is loaded never changes.
"""

from __future__ import annotations

from sm70_moe.policy.choose import choose_policy
from sm70_moe.policy.compare import Difference, compare_policies
from sm70_moe.policy.contract import Contract, WeightContract
from sm70_moe.policy.document import Evidence, Policy, Reactions
from sm70_moe.policy.feature import Check, Feature
from sm70_moe.policy.load import load_policies, load_policy, parse_policy, policies_folder, shipped_policies
from sm70_moe.policy.operator import read_operator
from sm70_moe.policy.route import CallConditions, Route, TokenRange
from sm70_moe.policy.schema import policy_schema

__all__ = [
    "CallConditions",
    "Check",
    "Contract",
    "Difference",
    "Evidence",
    "Feature",
    "Policy",
    "Reactions",
    "Route",
    "TokenRange",
    "WeightContract",
    "choose_policy",
    "compare_policies",
    "load_policies",
    "load_policy",
    "parse_policy",
    "policies_folder",
    "policy_schema",
    "read_operator",
    "shipped_policies",
]
