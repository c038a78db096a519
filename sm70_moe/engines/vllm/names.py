"""Names that the adapter, its users and vLLM share."""

from __future__ import annotations

QUANTIZATION = "sm70_awq"
"""What `--quantization` takes."""

SECTION = "sm70_moe"
"""The table of `--additional-config` that is ours."""

METHODS = ("awq", "compressed-tensors", "gptq")
"""`quant_method` of the checkpoints whose experts can be taken over."""

MATRICES = {"w1": "gate", "w3": "up", "w2": "down"}
"""vLLM's names of an expert's matrices."""

HALVES = {"gate": ("w13", 0), "up": ("w13", 1), "down": ("w2", 0)}
"""The parameter that holds a matrix, and its place there."""

MIN_CAPABILITY = 70
"""Compute capability 7.0, as vLLM writes it."""

ACTIVATIONS = ("float16", "bfloat16", "float32")
"""Names of torch dtypes that some route takes."""
