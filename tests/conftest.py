"""Settings of the whole suite."""

from __future__ import annotations

from hypothesis import settings

# no deadline: a busy machine is no failure, and no test of this suite measures time
settings.register_profile("suite", deadline=None, print_blob=True)
settings.load_profile("suite")
