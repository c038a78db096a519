"""For the tests of those who embed this package or write a backend, and for its own.

`fakes` need no torch; `conformance` does. None of this is imported by the package.
"""

from __future__ import annotations

from sm70_moe.admission.exemplar import contract_facts
from sm70_moe.testing.fakes import NATIVE, FakeNative, fake_backends, fake_build, fake_machine, settings

__all__ = [
    "NATIVE",
    "FakeNative",
    "contract_facts",
    "fake_backends",
    "fake_build",
    "fake_machine",
    "settings",
]
