"""Configs of transformers with values of one's own."""

import pytest
from transformers import BertConfig, BertModel

from hftune import ConfigError
from hftune.models.pretrained import load_config, load_model


def test_a_value_of_the_wrong_type_is_refused_in_a_sentence(tmp_path):
    BertConfig().save_pretrained(tmp_path)
    said = r"^task.model_config cannot be used: Field 'num_hidden_layers' expected int, got str \(value: 'three'\)\.$"
    for model, kind in ((str(tmp_path), {}), (None, {"model_type": "bert"})):
        with pytest.raises(ConfigError, match=said):
            load_config(model, {**kind, "num_hidden_layers": "three"})


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ({"hidden_act": "gelo"}, "KeyError: 'gelo'"),
        ({"hidden_size": 0}, "ZeroDivisionError: "),
    ],
)
def test_a_value_that_no_model_can_be_built_with_is_refused_in_a_sentence(tmp_path, field, said):
    small = {"hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 4}
    with pytest.raises(ConfigError, match=rf"^task.model_config cannot be built: {said}"):
        load_model(BertModel, None, BertConfig(**{**small, **field}))
    BertModel(BertConfig(**small)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=rf"^task.model={tmp_path} cannot be loaded: {said}"):
        load_model(BertModel, str(tmp_path), load_config(str(tmp_path), field))
