"""What the operator said about single layers."""

from __future__ import annotations

from sm70_moe.decision import Finding, Reason
from sm70_moe.policy import Feature


def layer_list(feature: Feature, exclusion: str | None) -> tuple[Finding, ...]:
    """The operator's allow and deny lists, for the features that they decide over."""
    if not feature.layer_lists:
        return ()
    if exclusion is None:
        return (Finding.passed("layer lists"),)
    if exclusion == "unknown":
        return (Finding.unknown("layer lists", "a layer index, since a list is set"),)
    reason = Reason.LAYER_DENIED if exclusion == "denied" else Reason.LAYER_NOT_ALLOWED
    return (Finding.failed("layer lists", reason, "listed", exclusion, "change the allow or deny list"),)
