"""MoELayer: what it converts, what it refuses, what it leaves to the plan."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from sm70_moe.checkpoint.checkpoint import Checkpoint
from sm70_moe.errors import BackendError, Sm70MoeError
from sm70_moe.reading.source import CheckpointSource
from sm70_moe.runtime.layer import MoELayer
from sm70_moe.runtime.service import AdmissionService
from sm70_moe.testing import fake_machine, settings

TINY = Path(__file__).parents[1] / "data" / "tiny-qwen3-moe-awq"


def build(**ranks: int) -> MoELayer:
    checkpoint = Checkpoint.open(TINY)
    found = checkpoint.layers[0]
    facts = checkpoint.facts(found, **{"tensor_parallel": 2, "tensor_rank": 0, "device": "cpu", **ranks})
    return AdmissionService(settings(), machine=fake_machine()).layer(facts, CheckpointSource(checkpoint, found, facts))


@pytest.fixture(scope="module")
def layer() -> MoELayer:
    return build()


def call(tokens: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, 256, generator=source).half()
    weights, ids = torch.rand(tokens, 16, generator=source).softmax(1).topk(4)
    return x, ids, weights


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_ids_and_router_weights_are_converted_once(layer: MoELayer, dtype: torch.dtype) -> None:
    """INT64 ids and 16-bit router weights give the bits of INT32 ids and their FP32 values."""
    x, ids, weights = call()
    narrow = weights.to(dtype)
    assert torch.equal(layer(x, ids, narrow), layer(x, ids.int(), narrow.float()))


@pytest.mark.parametrize("value", [2**40, 2**31, -(2**40), 16, -1])
def test_an_id_far_outside_contributes_zero(layer: MoELayer, value: int) -> None:
    """An INT64 id is not wrapped around into a valid one."""
    x, ids, weights = call()
    ids[:, 0] = value
    wanted = ids.clone()
    wanted[:, 0] = -1
    assert torch.equal(layer(x, ids, weights), layer(x, wanted, weights))


def test_no_tokens_launch_nothing(layer: MoELayer) -> None:
    """(0, H) comes back without a route."""
    assert layer(*call(0)).shape == (0, 256)


@pytest.mark.parametrize("which", ["x", "weights", "out"])
def test_gradients_are_refused_where_they_would_be_recorded(layer: MoELayer, which: str) -> None:
    """A layer has no backward: they would be dropped in silence. Where none are recorded nothing is refused."""
    x, ids, weights = call()
    wanted = layer(x, ids, weights)
    tensors = {"x": x, "weights": weights, "out": torch.empty_like(x)}
    tensors[which].requires_grad_()
    with pytest.raises(BackendError, match=f"{which}: requires_grad"):
        layer(tensors["x"], ids, tensors["weights"], tensors["out"])
    for quiet in (torch.no_grad, torch.inference_mode):
        with quiet():
            assert torch.equal(layer(tensors["x"], ids, tensors["weights"], tensors["out"]), wanted)


def test_what_belongs_to_a_process_is_not_pickled(layer: MoELayer) -> None:
    """Told in one sentence, with what can be sent instead; copies of what nothing changes are itself."""
    values = (layer, layer.plan, layer.plan.admission, layer.plan.admission.machine)
    service = AdmissionService(settings(), machine=fake_machine())
    for value in (*values, service):
        with pytest.raises(TypeError, match=f"{type(value).__name__}: .* settings and layer facts"):
            pickle.dumps(value)
    for value in values:
        assert copy.copy(value) is value
        assert copy.deepcopy(value) is value
    with pytest.raises(TypeError, match="AdmissionService"):
        copy.deepcopy(service)
    sent = (layer.plan.admission.facts, layer.plan.admission.settings)
    assert pickle.loads(pickle.dumps(sent)) == sent


@pytest.mark.parametrize("which", ["x", "ids", "weights"])
def test_an_output_over_an_input_is_refused(layer: MoELayer, which: str) -> None:
    """Also where the input is converted, so that the kernel itself would not see the overlap."""
    storage = torch.zeros(4096)
    x, ids, weights = call()
    out = storage.view(torch.float16)[: 3 * 256].view(3, 256)
    if which == "x":
        x = out
    elif which == "ids":
        ids = storage.view(torch.int64)[:12].view(3, 4)
    else:
        weights = storage.view(torch.float16)[:12].view(3, 4)
    with pytest.raises(BackendError, match=f"overlaps {which}"):
        layer(x, ids, weights, out)


@pytest.mark.parametrize("strides", [(1, 1), (128, 1), (0, 1)])
def test_an_output_that_overlaps_itself_is_refused(layer: MoELayer, strides: tuple[int, int]) -> None:
    """Rows that run into each other would be written twice."""
    out = torch.zeros(4096).half().as_strided((3, 256), strides)
    with pytest.raises(BackendError, match="strides"):
        layer(*call(), out)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("x", torch.zeros(3, 255).half()),
        ("x", torch.zeros(3, 256).double()),
        ("x", torch.zeros(3, 256, device="meta").half()),
        ("ids", torch.zeros(3, 5).int()),
        ("ids", torch.zeros(3, 4).short()),
        ("weights", torch.zeros(2, 4)),
        ("weights", torch.zeros(3, 4).double()),
    ],
)
def test_a_call_that_does_not_fit_is_named(layer: MoELayer, name: str, tensor: torch.Tensor) -> None:
    """Shape, dtype and device: the argument, what it is and what is accepted."""
    arguments = dict(zip(("x", "ids", "weights"), call(), strict=True)) | {name: tensor}
    with pytest.raises(BackendError, match=rf"^{name} (is|has)"):
        layer(**arguments)


def test_expert_parallel_ranks_add_up() -> None:
    """Ids are those of the whole layer on every rank; the ranks' outputs sum to one rank's."""
    x, ids, weights = call(5)
    whole = build(tensor_parallel=1)(x, ids, weights).float()
    parts = [
        build(tensor_parallel=1, expert_parallel=3, expert_rank=rank)(x, ids, weights).float() for rank in range(3)
    ]
    assert torch.allclose(sum(parts), whole, atol=2e-3, rtol=2e-3)
    assert all(part.abs().sum() > 0 for part in parts)


def test_a_capture_is_written_down_once_and_freezes_the_plans() -> None:
    """What a graph keeps is in the journal, and no layer is admitted after it."""
    checkpoint = Checkpoint.open(TINY)
    service = AdmissionService(settings(), machine=fake_machine())
    found = checkpoint.layers[0]
    facts = checkpoint.facts(found, tensor_parallel=2, tensor_rank=0, device="cpu")
    layer = service.layer(facts, CheckpointSource(checkpoint, found, facts))
    x, ids, weights = call(2)
    with capture_logs() as events:
        layer(x, ids, weights)
        for _ in range(2):
            layer.captured(layer.plan, 2, "legacy")
    assert [(e["layer"], e["tokens"], e["route"]) for e in events if e["event"] == "moe capture"] == [
        ("model.layers.0.mlp.experts", 2, "legacy")
    ]
    late = checkpoint.facts(checkpoint.layers[1], tensor_parallel=2, tensor_rank=0, device="cpu")
    with pytest.raises(Sm70MoeError, match="closed"):
        service.admit(late)


ODD = {
    "meta": lambda dense: dense.to("meta"),
    "sparse_coo": lambda dense: dense.to_sparse(),
    "nested": lambda dense: torch.nested.nested_tensor([*dense]),
    "quantised": lambda dense: torch.quantize_per_tensor(dense.float(), 0.1, 0, torch.quint8),
}


@pytest.mark.parametrize("name", ["x", "ids", "weights", "out"])
@pytest.mark.parametrize("kind", ODD)
@pytest.mark.filterwarnings("ignore")  # torch's own, about prototypes
def test_tensors_without_numbers_of_their_own(layer: MoELayer, name: str, kind: str) -> None:
    """Nested, sparse, quantised by torch, on no device: the argument and its kind."""
    arguments = dict(zip(("x", "ids", "weights"), call(), strict=True))
    arguments["out"] = torch.empty_like(arguments["x"])
    with pytest.raises(BackendError, match=f"^{name}( is|: on) .*{kind}"):
        layer(**arguments | {name: ODD[kind](arguments[name])})
