"""Checks and times the decode kernels on a GPU: `python bench/decode.py check time`, after `compile.py`.

Needs torch and numpy; the cubins of .bench/ are launched through libcuda, so that kernels can be tried
before a build holds them. Times are medians over graph replays of 48 layers, each behind the same plain
separating kernel (it writes ids and router weights); nothing here is a test. Without a GPU it rehearses:
everything around the kernels, with the kernels' part done in torch.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
SNAPSHOT = ROOT / ".bench" / "snapshot"  # a frozen copy of the package, where there is one
sys.path.insert(0, str(SNAPSHOT if SNAPSHOT.exists() else ROOT))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import banks  # noqa: E402  # found beside this script, and through the package above
import checks  # noqa: E402
import timing  # noqa: E402
from driver import Cuda  # noqa: E402

from sm70_moe.evidence.trial import Trial  # noqa: E402
from sm70_moe.reference.arithmetic import Reference  # noqa: E402


def rehearse() -> None:
    bank = banks.Bank(banks.Shape(256, 64, 4, 16), 1, every=True)

    def run(x, ids, weights, out, intermediate=None):  # type: ignore[no-untyped-def]  # a script
        banks.slow(bank, x, ids, weights, out, intermediate)

    for kind in (checks.random_call, checks.mixed):
        print(Trial("rehearsal", "torch", run, Reference(bank.read, 16), 64, factor=2.0).judge(kind(bank.shape, 3, 1)))


def section(work: Callable[[Cuda], None], cuda: Cuda) -> None:
    """One part must not stop the others: time on the device is short."""
    try:
        work(cuda)
    except Exception:
        traceback.print_exc()
        checks.note(work.__name__, False)


PARTS = {"quick": checks.quick, "check": checks.check, "time": timing.measure, "sanitize": checks.sanitize}


def main() -> None:
    if not torch.cuda.is_available():
        return rehearse()
    cuda = Cuda()
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    for name, work in PARTS.items():
        if name in sys.argv:
            section(work, cuda)
    wrong = [what for what, good in checks.CHECKS if not good]
    print(f"{len(checks.CHECKS)} checks, {len(wrong)} wrong", wrong[:20])
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
