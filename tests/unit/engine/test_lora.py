"""Which adapters a model can have."""

from __future__ import annotations

import warnings

import pytest

from moored.config import load_config
from moored.engine.lora import add_lora, plain_model
from moored.errors import ConfigError
from tests.tiny_model import tiny_config, tiny_model


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_adapters_wider_than_the_model_are_refused(family):
    model = tiny_model(family)
    width = tiny_config(family).hidden_size
    config = load_config(None, [f"optimizer.lora_rank={width + 1}"])
    with pytest.raises(ConfigError, match=f"rank = {width + 1} is more than the width {width} "):
        add_lora(model, config)
    assert not hasattr(model, "peft_config")


def test_adapters_as_wide_as_the_model_are_taken():
    model = tiny_model()
    width = model.config.hidden_size
    whole = add_lora(model, load_config(None, [f"optimizer.lora_rank={width}"]))
    assert plain_model(whole) is model


def test_adapters_come_without_warnings_that_only_peft_can_heed():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        add_lora(tiny_model(), load_config(None, ["optimizer.lora_rank=2"]))
