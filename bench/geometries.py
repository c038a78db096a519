"""Every geometry that the kernels promise something for: right first, then timed against rooflines of the same run.

    python bench/compile.py .o0. roofline runtime     # here: needs NVRTC, no GPU
    python bench/geometries.py OUT.json [check] [time] [NAME ...]

Results are written as they come, most important first; nothing here is a test.
"""

from __future__ import annotations

import json
import math
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import checks  # noqa: E402
from banks import DEVICE, Bank, Shape, up  # noqa: E402
from driver import Cuda  # noqa: E402
from kernels import FOLDER, Decode  # noqa: E402
from timing import Bench, Layer, ours  # noqa: E402

from sm70_moe.evidence.trial import Call, Trial  # noqa: E402
from sm70_moe.kernels.reference import AwqExpert, Reference  # noqa: E402

# bars: name, shape; E of a rank
GEOMETRIES = {
    "first": Shape(2560, 160, 10, 512, 32),
    "qwen30": Shape(2048, 192, 8, 128, 32),
    "q2": Shape(2048, 384, 8, 128, 128),
    "q1": Shape(2048, 768, 8, 128, 128),
    "glm": Shape(4096, 352, 8, 128, 32),
    "qnext": Shape(2048, 512, 10, 512, 128),
    "mix": Shape(4096, 3584, 2, 8, 128),
    "lite": Shape(2048, 704, 6, 64, 64),
    "mini": Shape(3072, 192, 8, 256, 64),
    "mix32": Shape(4096, 3584, 2, 8, 32),
}
FEW = 12  # experts of a bank that is only checked
BANKS = 8


class Report:
    """What was found so far, on disk after every line."""

    def __init__(self, path: Path) -> None:
        self.path, self.found, self.start = path, {}, time.time()

    def note(self, name: str, what: str, value: object) -> None:
        self.found.setdefault(name, {})[what] = value
        self.path.write_text(json.dumps(self.found, indent=1))
        print(f"{time.time() - self.start:6.1f} {name:8s} {what:36s} {value}", flush=True)


def guarded(report: Report, name: str, work: Callable[..., None], *arguments: object) -> None:
    """One part must not stop the others."""
    try:
        work(report, name, *arguments)
    except Exception as error:
        traceback.print_exc()
        report.note(name, f"{work.__name__} failed", f"{type(error).__name__}: {error}"[:300])


@dataclass(frozen=True)
class Decoded:
    """A matrix that was decoded on the device: the reference's own decoding takes seconds for these sizes."""

    columns_of: torch.Tensor

    def weights(self, rows: slice, columns: slice) -> np.ndarray:
        return self.columns_of[rows, columns].double().cpu().numpy()


def judged(decode: Decode, name: str, call: Call) -> dict[str, object]:
    bank = decode.bank

    def read(expert: int) -> AwqExpert:
        both = bank.decoded("w13", expert)
        return AwqExpert(Decoded(both[:, 0::2]), Decoded(both[:, 1::2]), Decoded(bank.decoded("w2", expert)))

    trial = Trial(name, "native", decode, Reference(read, bank.shape.experts), bank.shape.inner, factor=2.0, rows=2)
    r = trial.judge(call)
    row = {"w13": r.w13, "w2": r.w2, "out": r.out, "exact": r.out_exact, "finite": r.finite, "repeat": r.repeatable}
    return {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()} | {"ok": r.ok}


def right(report: Report, name: str, cuda: Cuda) -> None:
    """Rows of any M have one set of bits, whatever reads the bank; and the bits of M = 8 are within bounds."""
    shape = GEOMETRIES[name]
    few = Shape(shape.hidden, shape.inner, shape.top_k, min(shape.experts, max(FEW, shape.top_k)), shape.group)
    bank = Bank(few, 1, every=True)
    one = Decode(cuda, name, bank)
    checks.CHECKS.clear()
    checks.glance(name, one)
    checks.check_rows(name, one)
    checks.check_repeat(name, one, 30)
    for metadata in (3, 2):
        if not (FOLDER / f"decode_w2.{name}.o0.m{metadata}.s0.cubin").exists():
            continue
        checks.alike(f"{name} metadata {metadata}", one, Decode(cuda, name, bank, metadata=metadata))
    checks.alike(f"{name} by runtime", one, Decode(cuda, "runtime", bank))
    checks.alike(f"{name} tiles by runtime", one, Decode(cuda, "runtime", bank, order=1, metadata=3))
    for many in ((1, 1), (3, 3), (16, 16)):
        other = Decode(cuda, name, bank)
        other.many = many
        checks.alike(f"{name} many {many}", one, other)
    chained(other)
    chained(one)
    report.note(name, "checks", len(checks.CHECKS))
    report.note(name, "wrong", [what for what, good in checks.CHECKS if not good][:12])
    report.note(name, "bounds M=8", judged(one, name, checks.random_call(few, 8, 8)))
    report.note(name, "bounds M=3 mixed", judged(one, name, checks.mixed(few, 3, 103)))


def volta(report: Report, name: str, cuda: Cuda) -> None:
    """The quad-pair step, emulated."""
    shape = GEOMETRIES[name]
    few = Shape(shape.hidden, shape.inner, shape.top_k, min(shape.experts, max(FEW, shape.top_k)), shape.group)
    bank = Bank(few, 1, every=True)
    step = Decode(cuda, name, bank, volta=True)
    checks.CHECKS.clear()
    checks.glance(f"{name} volta", step)
    checks.check_rows(f"{name} volta", step)
    checks.alike(f"{name} volta by runtime", step, Decode(cuda, "runtime", bank, volta=True))
    report.note(name, "volta wrong", [what for what, good in checks.CHECKS if not good][:12])
    report.note(name, "volta bounds M=3 mixed", judged(step, name, checks.mixed(few, 3, 103)))


def chained(decode: Decode, layers: int = 8) -> None:
    """Layers that feed each other through one scratch, all launches dependent: bits of plain launches."""
    shape = decode.bank.shape
    for m in (1, 4, 8):
        call = checks.random_call(shape, m, 21)
        scratch = decode.poisoned(m)
        rows = [torch.empty_like(call.x) for _ in range(layers)]

        def run(rows: list[torch.Tensor] = rows, call: Call = call, scratch: torch.Tensor = scratch) -> None:
            x = call.x
            for out in rows:
                decode(x, call.ids, call.weights, out, scratch)
                x = out

        decode.dependent = False
        run()
        expected = [row.clone() for row in rows]
        decode.dependent = True
        good = True
        for _ in range(20):
            for row in rows:
                row.fill_(math.nan)
            run()
            good &= all(checks.same(a, b) for a, b in zip(rows, expected, strict=True))
        checks.note(f"chain M={m}", good)


def rooflines(b: Bench) -> Iterator[tuple[str, Layer]]:
    """Bytes of both products in two launches: a block for each tile of each expert, or of all experts."""
    s = b.shape
    sizes = {"w13": (2 * s.inner // 8, s.hidden), "w2": (s.hidden // 8, s.inner)}
    loads = {name: (k // 32 * 128 + k // s.group * 32) // 16 for name, (_, k) in sizes.items()}

    def tiles(n: int, name: str, threads: int, dependent: bool) -> None:
        words, groups, _, _ = b.bank(n).addresses(name, 0, 4)
        count, k = sizes[name]
        kernel = b.roof13 if name == "w13" else b.tiles2
        grid, ends = (count, len(b.distinct[n])), (b.ids.data_ptr(), b.sink.data_ptr())
        tile = k // 32 * 128, k // s.group * 32
        kernel.launch(grid, threads, words, groups, *ends, count, *tile, dependent=dependent)

    def shared(n: int, threads: int, split: int, dependent: bool) -> None:
        words, groups, _, _ = b.bank(n).addresses("w2", 0, 4)
        count, k = sizes["w2"]
        at_once = threads // loads["w2"] * split
        each = next(e for e in (1, 2, 4, 8) if e * at_once >= b.most_distinct)
        sizes_of = count, k // 32 * 128, k // s.group * 32, len(b.distinct[n])
        block = threads // loads["w2"] * loads["w2"]
        ends = b.ids.data_ptr(), b.sink.data_ptr()
        b.roof2[each].launch((count, split), block, words, groups, *ends, *sizes_of, dependent=dependent)

    def both(wide: int, second: Callable[[int, bool], None], dependent: bool) -> Layer:
        def run(n: int) -> None:
            b.separator(n, distinct=True)
            tiles(n, "w13", wide, dependent)
            second(n, dependent)

        return run

    seconds: dict[str, Callable[[int, bool], None]] = {}
    for each in (4, 2):
        threads = max(32, up(loads["w2"], each))
        seconds[f"each{each}"] = lambda n, d, t=threads: tiles(n, "w2", t, d)
    for threads, split in ((128, 1), (256, 1), (256, 2), (512, 1), (512, 2), (256, 8), (256, 16)):
        if 8 * (threads // loads["w2"]) * split >= b.most_distinct:
            seconds[f"t{threads}s{split}"] = lambda n, d, t=threads, p=split: shared(n, t, p, d)
    wides = [w for w in (up(loads["w13"], 5), up(loads["w13"], 3)) if w <= 1024]
    for name, second in seconds.items():
        for wide in wides:
            yield f"roof {name} w{wide} plain", both(wide, second, False)
            yield f"roof {name} w{wide} dependent", both(wide, second, True)


def timed(report: Report, name: str, cuda: Cuda, variants: dict[str, tuple[str, str]]) -> None:
    shape = GEOMETRIES[name]
    banks = [Bank(shape, 10 + n, every=n == 0) for n in range(BANKS)]
    for tokens in (1, 2, 4, 8):
        bench = Bench(cuda, banks, tokens)
        found: dict[str, float] = {"D": round(bench.mean, 1)}

        def take(what: str, layer: Layer, samples: int = 7, found: dict = found, bench: Bench = bench) -> None:
            found[what] = round(bench.time(layer, samples, 5)[0], 2)

        for kind, layer in rooflines(bench):
            take(kind, layer, 5)
        plain = min(v for k, v in found.items() if k.endswith("plain"))
        linked = min(v for k, v in found.items() if k.endswith("dependent"))
        kept = {
            "D": found["D"],
            "roof": plain,
            "roof dependent": linked,
            "roof shape": next(k for k, v in found.items() if v == plain),
        }
        found.clear()
        base, runtime = Decode(cuda, name, banks[0]), Decode(cuda, "runtime", banks[0])
        take("dependent", ours(bench, base, True), 9)
        take("plain", ours(bench, base, False), 9)
        take("w13 plain", ours(bench, base, False, "w13"))
        take("w2 plain", ours(bench, base, False, "w2"))
        take("runtime dependent", ours(bench, runtime, True))
        good = bool(torch.isfinite(bench.out).all())
        best = [("one", found["w13 plain"], 0), ("one", found["w2 plain"], 0)]
        for octets in (2, 3, 4, 6, 8, 16):
            for at, part in enumerate(("w13", "w2")):
                base.many = (octets, octets)
                took = bench.time(ours(bench, base, False, part), 5, 5)[0]
                found[f"{part} many {octets}"] = round(took, 2)
                best[at] = min(best[at], ("many", took, octets), key=lambda b: b[1])
        base.many = best[0][2], best[1][2]
        found["best"] = str(base.many)
        take("best dependent", ours(bench, base, True), 9)
        take("best plain", ours(bench, base, False), 9)
        bench.early = True
        take("best early dependent", ours(bench, base, True), 9)
        wide, second = kept["roof shape"].split()[2:0:-1]
        for kind, layer in rooflines(bench):
            if kind.endswith("dependent") and f" {second} {wide} " in kind:
                take("roof early dependent", layer)
        bench.early = False
        for metadata in (3, 2):
            other = Decode(cuda, name, banks[0], metadata=metadata)
            other.many = base.many
            # banks of other kinds of metadata are there once only: every layer reads the first
            few = Bench(cuda, banks[:1], tokens)
            found[f"metadata {metadata} / 4, one bank"] = round(
                few.time(ours(few, other, True), 5, 5)[0] / few.time(ours(few, base, True), 5, 5)[0], 3
            )
        for source, other in variants.items():
            decode = Decode(cuda, name, banks[0], variants=other)
            decode.many = base.many
            for octets in (3, 6, 8):
                decode.many = (octets, octets)
                part = "w13" if "w13" in source else "w2"
                found[f"{source} {octets}"] = round(bench.time(ours(bench, decode, False, part), 5, 5)[0], 2)
        base.many = (0, 0)
        ratios = {k: round(v / plain, 2) for k, v in found.items() if k.endswith(("dependent", "plain"))}
        report.note(name, f"M={tokens}", kept | found | {"ratio": ratios, "finite": good})
        torch.cuda.empty_cache()


def variants_of(name: str) -> dict[str, tuple[str, str]]:
    """Other macros of this geometry's kernels that were compiled: files `SOURCE.NAME.vSOMETHING.cubin`."""
    made = {}
    for file in sorted(FOLDER.glob(f"decode_*.{name}.v*.cubin")):
        source, _, variant = file.stem.split(".")
        made[f"{source} {variant}"] = (variant, "") if source == "decode_w13" else ("", variant)
    return made


def main(out: str, *words: str) -> None:
    cuda, report = Cuda(), Report(Path(out))
    print(torch.cuda.get_device_name(), torch.__version__, DEVICE, flush=True)
    names = [w for w in words if w in GEOMETRIES] or list(GEOMETRIES)
    if "check" in words:
        for name in names:
            guarded(report, name, right, cuda)
    if "time" in words:
        for name in names:
            guarded(report, name, timed, cuda, variants_of(name) if "variants" in words else {})
    if "volta" in words:
        for name in names:
            guarded(report, name, volta, cuda)


if __name__ == "__main__":
    main(*sys.argv[1:])
