"""Configs of transformers with values of one's own."""

import pytest
from transformers import BertConfig

from hftune import ConfigError
from hftune.models.pretrained import load_config


def test_a_value_of_the_wrong_type_is_refused_in_a_sentence(tmp_path):
    BertConfig().save_pretrained(tmp_path)
    said = r"^task.model_config cannot be used: Field 'num_hidden_layers' expected int, got str \(value: 'three'\)\.$"
    for model, kind in ((str(tmp_path), {}), (None, {"model_type": "bert"})):
        with pytest.raises(ConfigError, match=said):
            load_config(model, {**kind, "num_hidden_layers": "three"})
