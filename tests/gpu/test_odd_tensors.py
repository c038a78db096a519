"""Misaligned, strided and padded tensors: the documented route takes them (docs/routes.md), and is right."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch

from sm70_moe.evidence.trial import Inputs, same_bits

pytestmark = pytest.mark.gpu

ROUTES = {1: ("qpn_m1", "legacy_single_token"), 2: ("grouped_decode", "legacy"), 8: ("grouped_decode", "legacy")}
"""Tokens -> the native route, and the one that a call takes which misses a condition of it."""


def plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers, contiguous, one element behind an aligned address."""
    room = tensor.new_empty(tensor.numel() + 1)
    return room[1:].view(tensor.shape).copy_(tensor)


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """Every second column of a tensor that is twice as wide; NaN, or an invalid id, between."""
    room = filler(tensor, tensor.shape[0], 2 * tensor.shape[1])
    return room[:, ::2].copy_(tensor)


def padded(tensor: torch.Tensor) -> torch.Tensor:
    """Rows that stand 16 bytes or more apart, and a row too many, so that one row is strided as well."""
    room = filler(tensor, tensor.shape[0] + 1, tensor.shape[1] + 16 // tensor.element_size())
    return room[: tensor.shape[0], : tensor.shape[1]].copy_(tensor)


def filler(tensor: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    return tensor.new_full((rows, columns), torch.nan if tensor.is_floating_point() else -1)


SHAPES = {"misaligned": misaligned, "strided": strided, "padded": padded}
ODD = [(shape, name) for shape in SHAPES for name in ("x", "out", "ids", "weights")]


def native_takes(shape: str, name: str, tokens: int) -> bool:
    """Ids and router weights may be misaligned; a single padded row is contiguous, as torch counts it."""
    return (shape == "misaligned" and name in ("ids", "weights")) or (shape == "padded" and tokens == 1)


@pytest.fixture(scope="module")
def subject(layers):
    return layers.make()


def altered(run: Callable[..., None], **odd: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., None]:
    """`run` with some of its arguments laid out in another way."""

    def call(x, ids, weights, out, intermediate=None) -> None:
        given = {"x": x, "ids": ids, "weights": weights, "out": out}
        given |= {name: alter(given[name]) for name, alter in odd.items()}
        run(*given.values(), intermediate)
        if given["out"] is not out:
            out.copy_(given["out"])

    return call


@pytest.mark.parametrize("tokens", ROUTES)
@pytest.mark.parametrize(("shape", "name"), ODD, ids=lambda part: part)
def test_the_documented_route_takes_it(subject, routes_of, shape: str, name: str, tokens: int) -> None:
    """The plan names the route, the layer takes it, and the result keeps the bounds of the reference."""
    call = subject.call(tokens, seed=tokens)
    given = {"x": call.x, "ids": call.ids, "weights": call.weights, "out": torch.empty_like(call.x)}
    given[name] = SHAPES[shape](given[name])
    wanted = ROUTES[tokens][not native_takes(shape, name, tokens)]
    assert subject.route(*given.values()) == wanted
    with routes_of(subject.layer) as taken:
        result = subject.judge(call, altered(subject.run, **{name: SHAPES[shape]}))
    assert set(taken) == {wanted}
    assert result.ok, result


@pytest.mark.parametrize("tokens", ROUTES)
def test_everything_at_once(subject, routes_of, tokens: int) -> None:
    """Strided x, padded out, strided ids and weights."""
    odd = {"x": strided, "ids": strided, "weights": strided, "out": padded}
    with routes_of(subject.layer) as taken:
        result = subject.judge(subject.mixed(tokens, seed=7), altered(subject.run, **odd))
    assert set(taken) == {ROUTES[tokens][1]}
    assert result.ok, result


@pytest.mark.parametrize("tokens", ROUTES)
def test_nothing_but_the_output_is_written(subject, tokens: int) -> None:
    """What stands between and around the rows of a padded output stays."""
    call = subject.call(tokens, seed=3)
    room = torch.full((tokens + 2, subject.sizes.hidden + 8), 7.0, dtype=torch.float16, device=subject.device)
    out = room[1:-1, 8:]
    subject.layer(call.x, call.ids, call.weights, out)
    assert same_bits(out.contiguous(), subject.layer(call.x, call.ids, call.weights, padded(call.x)).contiguous())
    out.fill_(7.0)
    assert (room == 7.0).all()


@pytest.mark.parametrize("tokens", ROUTES)
def test_the_native_kernels_write_nothing_around_the_output(subject, tokens: int) -> None:
    """An aligned output in the middle of a larger buffer."""
    call = subject.call(tokens, seed=4)
    room = torch.full((tokens + 2, subject.sizes.hidden), 7.0, dtype=torch.float16, device=subject.device)
    subject.layer(call.x, call.ids, call.weights, room[1:-1])
    assert same_bits(room[1:-1], subject.answer(call))
    assert (room[[0, -1]] == 7.0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", ROUTES)
def test_other_activations(subject, routes_of, tokens: int, dtype: torch.dtype) -> None:
    """BF16 and FP32 are no native route's; the rounding points are the dtype's own."""
    made = subject.call(tokens, seed=5)
    with routes_of(subject.layer) as taken:
        result = subject.judge(Inputs(made.x.to(dtype), made.ids, made.weights))
    assert set(taken) == {ROUTES[tokens][1]}
    assert result.ok, result


def test_a_captured_odd_call_is_on_record(layers, graph_of, tmp_path) -> None:
    """The journal names the older route that a graph keeps, and the plan says which condition decided."""
    sizes = layers.make().sizes
    service = layers.service(sizes, SM70_MOE_JOURNAL=str(tmp_path / "journal.jsonl"))
    subject = layers.layer(service, sizes)
    for tokens in (1, 2):
        call = subject.call(tokens)
        x, out = misaligned(call.x), torch.empty_like(call.x)
        graph_of(lambda x=x, call=call, out=out: subject.layer(x, call.ids, call.weights, out))
    lines = map(json.loads, (tmp_path / "journal.rank0.jsonl").read_text().splitlines())
    captured = [(line["tokens"], line["route"], line["plan"]) for line in lines if line["event"] == "moe capture"]
    digest = subject.layer.plan.digest
    assert captured == [(1, "legacy_single_token", digest), (2, "legacy", digest)]
    open_routes = subject.layer.plan.reachable(2)
    assert [(route.name, route.call.alignment if route.call else None) for route in open_routes] == [
        ("grouped_decode", 16),
        ("native_decode", 16),
        ("legacy", None),
    ]
