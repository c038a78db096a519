"""What an operator reads in vLLM's own log, from the first rank: the table of decisions once, then what matters."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from sm70_moe.admission.admit import Admission
from sm70_moe.decision import Plain
from sm70_moe.plan.layergroup import collapse
from sm70_moe.plan.plan import Plan
from sm70_moe.printable import printable
from sm70_moe.record.explanation import explain

LOGGER = logging.getLogger("vllm.sm70_moe")
"""Below vLLM's own logger, whose handlers and level it has."""

SAID = frozenset({"moe summary", "moe proven", "moe kernels"})
"""Events that are said whatever their level; of others only warnings and errors."""


class HostLog:
    """A sink: decisions are told by `table` when all are made, and not one by one."""

    def admitted(self, admission: Admission) -> None:
        pass

    def event(self, name: str, level: str = "info", **fields: Plain) -> None:
        if name in SAID or level != "info":
            LOGGER.log(
                logging.getLevelNamesMapping()[level.upper()], "%s: %s", name, printable(str(fields.get("text")))
            )

    def flush(self) -> None:
        pass


def table(plans: Iterable[Plan]) -> None:
    """Alike layers once, as `explain` has them: routes, tokens, outcomes, reasons."""
    for line in explain(list(collapse(plan.admission for plan in plans))).splitlines():
        LOGGER.info("%s", printable(line))
