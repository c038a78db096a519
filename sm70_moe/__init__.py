"""Decides, explains and runs the right kernel for 4-bit (AWQ) mixture-of-experts layers.

The public names load on first use, so that the import itself reads no environment, configures
nothing and does not import torch.
"""

from __future__ import annotations

__version__ = "0.1.0"
