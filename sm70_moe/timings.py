"""The words of a result of `sm70-moe bench`: what was launched, how, and which part of a layer.

The benchmark writes them and a model reads them; neither knows the other.
"""

from __future__ import annotations

SCHEMA = 1

RESULT = f"a result of `sm70-moe bench`, schema {SCHEMA}"

SEPARATOR, FLOOR, ROOFLINE, OURS, FUSED, LEGACY = "separator", "floor", "roofline", "ours", "fused", "legacy"
"""Names of arms: the separating kernel alone; it and two empty kernels; read-only; our routes in two launches
and in one; torch."""

PLAIN, DEPENDENT, EAGER = "plain", "dependent", "eager"
"""How kernels were launched: one after the other in a graph; overlapping in a graph; without a graph."""

BOTH, W13, W2 = "both", "w13", "w2"
"""Which of a layer's two products an arm runs."""

RIGHT, UNJUDGED, WRONG = "right", "not judged", "wrong"
"""How a row's output came out. What is wrong follows after `WRONG` and a colon."""
