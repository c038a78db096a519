"""`--additional-config` and what is refused by name, on hosts that are made up: no vLLM is needed here."""

from __future__ import annotations

from types import SimpleNamespace as Of

import pytest

from sm70_moe.engines.vllm.limits import require_half, require_possible
from sm70_moe.engines.vllm.options import read_settings
from sm70_moe.errors import BackendError, SettingsError, Sm70MoeError
from sm70_moe.settings.layerlists import LayerList


def test_the_grammar_of_variables_in_json():
    """Numbers, lists and texts; what is given here goes before the environment."""
    read = read_settings({"sm70_moe": {"strict": 1, "layer_deny": [0, "3-4"], "flags": {"qpn_m1": 0}, "cache": None}})
    assert (read.strict, read.layer_deny, read.cache) == (True, LayerList.parse("x", "0,3-4"), None)
    assert read.flag_arguments == (("qpn_m1", "0"),)
    assert {read.sources[name] for name in ("strict", "layer_deny")} == {"argument"}


@pytest.mark.parametrize("additional", [None, {}, {"other": 1}, {"sm70_moe": {}}, {"sm70_moe.plans": "x"}])
def test_nothing_of_ours_changes_nothing(additional):
    assert read_settings(additional).flag_arguments == ()


@pytest.mark.parametrize(
    ("additional", "told"),
    [
        ({"sm70_moe": {"strict": True}}, ["sm70_moe.strict='true'", "0 and 1"]),
        ({"sm70_moe": {"layer_deny": [0.5]}}, ["sm70_moe.layer_deny='0.5'"]),
        ({"sm70_moe": {"persistent_tokens": 64}}, ["sm70_moe.persistent_tokens='64'", "from 1 to 32"]),
        ({"sm70_moe": {"jurnal": "x"}}, ["sm70_moe.jurnal", "journal"]),
        ({"sm70_moe": {"flags": {"qpn_m1": True}}}, ["sm70_moe.flags.qpn_m1='true'"]),
        ({"sm70_moe": {"flags": {"qnp_m1": 1}}}, ["sm70_moe.flags.qnp_m1", "qpn_m1", "grouped_decode"]),
        ({"sm70-moe": {"strict": 1}}, ["'sm70-moe'", "'sm70_moe'"]),
        ({"SM70_MOE": {"strict": 1}}, ["'SM70_MOE'", "'sm70_moe'"]),
        ({"sm70_moe": ["strict"]}, ["sm70_moe is ['strict']", "a table"]),
        ({"sm70_moe": {"policy": "no-such-policy"}}, ["no-such-policy"]),
    ],
)
def test_what_is_wrong_is_named_with_its_place(additional, told):
    with pytest.raises(Sm70MoeError) as caught:
        read_settings(additional)
    assert [part for part in told if part not in str(caught.value)] == []


def test_a_misspelt_flag_is_one_error():
    """Neither "no effect" beside it nor a refusal of layers later."""
    with pytest.raises(SettingsError) as caught:
        read_settings({"sm70_moe": {"flags": {"qnp_m1": 1}}})
    assert len(str(caught.value).splitlines()) == 1


def test_everything_that_is_wrong_is_told_together(monkeypatch):
    monkeypatch.setenv("SM70_MOE_GROUPED_DECODE", "yes")
    with pytest.raises(SettingsError) as caught:
        read_settings({"sm70_moe": {"persistent_tokens": 64}})
    text = str(caught.value)
    assert ("sm70_moe.persistent_tokens='64'" in text, "SM70_MOE_GROUPED_DECODE='yes'" in text) == (True, True)


def host(**changes):
    parts = {
        "lora_config": None,
        "parallel_config": Of(data_parallel_size=1),
        "model_config": Of(enable_sleep_mode=False),
    }
    return Of(**{**parts, **changes})


def test_what_cannot_be_had_is_named_all_of_it():
    require_possible(host())
    wrong = host(lora_config=Of(), parallel_config=Of(data_parallel_size=2), model_config=Of(enable_sleep_mode=True))
    with pytest.raises(BackendError) as caught:
        require_possible(wrong)
    for option in ("--enable-lora", "--data-parallel-size 2", "--enable-sleep-mode"):
        assert option in str(caught.value)


class AWQLinearMethod: ...


class UnquantizedLinearMethod: ...


def test_quantised_linears_in_float32_are_refused_before_the_first_request():
    require_half("torch.float16", "a", AWQLinearMethod())
    require_half("torch.float32", "a", UnquantizedLinearMethod())
    require_half("torch.float32", "a", None)
    with pytest.raises(BackendError) as caught:
        require_half("torch.float32", "model.layers.0.self_attn.o_proj", AWQLinearMethod())
    assert [part for part in ("o_proj", "float16") if part not in str(caught.value)] == []
