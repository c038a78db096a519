"""How vLLM finds us, and that it does not where nobody asked."""

from __future__ import annotations

import pickle
import subprocess
import sys
from importlib.metadata import entry_points

import pytest


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    import os

    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, timeout=180
    )


def test_the_entry_point_is_register():
    """vLLM loads it by group and name in every process."""
    from sm70_moe.engines.vllm import register

    (found,) = [point for point in entry_points(group="vllm.general_plugins") if point.name == "sm70_moe"]
    assert found.load() is register


def test_importing_the_plugin_imports_no_vllm():
    """What fails at import is only logged by vLLM, so nothing of the host is imported there."""
    code = "import sys, sm70_moe.engines.vllm; print([m for m in sys.modules if m.split('.')[0] in ('vllm', 'torch')])"
    assert run(code).stdout.strip() == "[]"


def test_the_package_imports_without_the_adapters():
    """Nothing else imports them."""
    code = (
        "import sys, sm70_moe; from sm70_moe.runtime import operator, service; "
        "print([m for m in sys.modules if 'engines' in m])"
    )
    assert run(code).stdout.strip() == "[]"


def test_registering_twice_changes_nothing():
    """Processes that are forked or load plug-ins again see one method."""
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, get_quantization_config

    from sm70_moe.engines.vllm import QUANTIZATION, register
    from sm70_moe.engines.vllm.config import Sm70AwqConfig

    register()
    register()
    assert QUANTIZATION_METHODS.count(QUANTIZATION) == 1
    assert get_quantization_config(QUANTIZATION) is Sm70AwqConfig


@pytest.mark.parametrize("asked", [None, "awq", "auto_awq", "compressed-tensors"])
def test_other_wishes_are_left_alone(asked, monkeypatch):
    """Even settings that are wrong do not matter to engines that did not ask for us."""
    from sm70_moe.engines.vllm.config import Sm70AwqConfig

    monkeypatch.setenv("SM70_MOE_QPN_M1", "nonsense")
    assert Sm70AwqConfig.override_quantization_method({"quant_method": "awq"}, asked) is None


def test_configs_travel_to_workers_without_their_engine(experts_only):
    """They are pickled; a service has locks and open decisions."""
    from sm70_moe.engines.vllm.config import Sm70AwqConfig

    config = Sm70AwqConfig.from_config(experts_only.config["quantization_config"] | {})
    config.engine = lambda: None  # nothing that pickles
    there = pickle.loads(pickle.dumps(config))
    assert (there.engine, there.raw, there.get_name()) == (None, config.raw, "sm70_awq")


def test_configs_are_the_host_s_own_kind(experts_only, compressed, gptq):
    """Models of vLLM ask what class a config has, and linear layers go the host's way."""
    from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig
    from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

    from sm70_moe.engines.vllm.config import Sm70AwqConfig

    made = [
        Sm70AwqConfig.from_config(f.config["quantization_config"])
        for f in (experts_only, compressed(True), gptq("gptq"))
    ]
    kinds = (AutoAWQConfig, CompressedTensorsConfig, AutoGPTQConfig)
    assert [isinstance(one, kind) for one, kind in zip(made, kinds, strict=True)] == [True, True, True]


def test_row_groups_outside_of_experts_are_dropped():
    """As the host does with all; those of experts are looked at."""
    from sm70_moe.engines.vllm.takeover import Takeover

    names = ["model.layers.0.self_attn.q_proj.g_idx", "model.layers.0.mlp.experts.3.up_proj.g_idx", "lm_head.weight"]
    assert Takeover.get_checkpoint_weight_mapper().apply_list(names) == names[1:]


@pytest.mark.slow
def test_an_engine_without_plugins_refuses_our_name(experts_only, tmp_path):
    """`VLLM_PLUGINS=""` drops plug-ins silently; an explicit quantization makes that an error."""
    folder = experts_only.write(tmp_path / "m")
    code = f"from vllm import LLM; LLM({str(folder)!r}, skip_tokenizer_init=True, quantization='sm70_awq')"
    found = run(code, VLLM_PLUGINS="")
    assert found.returncode != 0
    assert "sm70_awq" in found.stderr
