"""What a student learns from a teacher, and which teachers are refused, before anything is trained."""

import dataclasses
import math
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import binary_cross_entropy, binary_cross_entropy_with_logits, kl_div
from transformers import AutoTokenizer
from transformers.modeling_outputs import CausalLMOutput

from hftune import ConfigError, DataError, Recipe
from hftune.config import TrainConfig
from hftune.models.weights import weights_digest
from hftune.replay.outcome import environment_differences
from hftune.strategies.teacher import Teacher, divergence, load_teacher
from hftune.tasks import Chats, LanguageModeling
from hftune.tasks.problems import MultiLabel, Regression, SingleLabel
from tests.support.runs import SMALL


def test_the_divergence_is_that_of_the_tempered_distributions_summed_over_items():
    torch.manual_seed(0)
    own, theirs = torch.randn(5, 7), 3 * torch.randn(5, 7)
    p, q = (torch.exp(logits / 4) / torch.exp(logits / 4).sum(1, keepdim=True) for logits in (theirs, own))
    expected = (p * (p / q).log()).sum()
    assert divergence(own, theirs, 4.0) == pytest.approx(float(expected), rel=1e-5)
    assert divergence(own, theirs, 4.0) == pytest.approx(float(kl_div(q.log(), p, reduction="sum")), rel=1e-5)
    assert divergence(own, own, 4.0) == 0
    assert divergence(own[:0], theirs[:0], 4.0) == 0


def test_each_of_several_labels_is_an_item_of_two_classes():
    torch.manual_seed(0)
    own, theirs = torch.randn(4, 3), torch.randn(4, 3)
    items = MultiLabel(["a", "b", "c"]).item_logits
    p = theirs.sigmoid()
    expected = binary_cross_entropy_with_logits(own, p, reduction="sum") - binary_cross_entropy(p, p, reduction="sum")
    assert divergence(items(own), items(theirs), 1.0) == pytest.approx(float(expected), rel=1e-5)


def test_numbers_and_weighted_classes_have_no_items_for_a_teacher():
    assert Regression().item_logits(torch.zeros(2, 1)) is None
    for problem in (SingleLabel, MultiLabel):
        assert problem(["a", "b"], [1.0, 2.0]).item_logits(torch.zeros(2, 2)) is None


def test_what_a_teacher_rules_out_does_not_count():
    own, theirs = torch.zeros(1, 3, requires_grad=True), torch.tensor([[0.0, 0.0, -torch.inf]])
    found = divergence(own, theirs, 1.0)
    found.backward()
    assert found.item() == pytest.approx(math.log(1.5), rel=1e-6) and own.grad.isfinite().all()


def test_words_that_only_pad_the_vocabulary_do_not_count():
    task = LanguageModeling(tokenizer="words", model_config={"model_type": "gpt2"}, dataset="hftune.data.demo:paragraphs")
    words = len(task.text_tokenizer)
    assert words > 300
    labels = torch.tensor([[1, -100, 3]])
    one, padded = (CausalLMOutput(logits=torch.zeros(1, 3, count)) for count in (words, words + 5))
    assert task.item_logits(one, labels).shape == task.item_logits(padded, labels).shape == (2, words)


# Refusals


@pytest.fixture(scope="module")
def recipe():
    recipe = Recipe.load("yelp_demo", *SMALL)
    recipe.task.datasets()
    return recipe


@pytest.fixture
def folder(recipe, tmp_path):
    recipe.task.save(recipe.task.build_model(), tmp_path)
    return tmp_path


def teach(recipe, folder):
    return load_teacher(recipe.task, TrainConfig(teacher=str(folder)))


def test_a_teacher_is_frozen_and_leaves_the_task_and_the_random_numbers_alone(recipe, folder):
    before, tokenizer = torch.get_rng_state(), recipe.task.text_tokenizer
    teacher = teach(recipe, folder)
    assert torch.equal(torch.get_rng_state(), before) and recipe.task.text_tokenizer is tokenizer
    assert not teacher.model.training and not any(value.requires_grad for value in teacher.model.parameters())
    assert teacher.digest == teach(recipe, folder).digest and teacher.commits == {}


def test_a_teacher_takes_the_padding_of_the_student_and_its_digest_no_buffers_of_a_machine(recipe, folder):
    model = recipe.task.build_model()
    model.config.pad_token_id = 7
    model.save_pretrained(folder)
    teacher = teach(recipe, folder)
    assert teacher.model.config.pad_token_id == recipe.task.text_tokenizer.pad_token_id != 7
    own = [*dict(teacher.model.named_buffers()).keys() - teacher.model.state_dict().keys()]
    assert own
    assert teacher.digest == weights_digest(model.state_dict().items())


def refused(recipe, folder):
    with pytest.raises(ConfigError) as caught:
        teach(recipe, folder)
    return str(caught.value).removeprefix(f"train.teacher={folder}")


def test_a_teacher_of_other_classes_is_refused(recipe, folder):
    model = recipe.task.build_model()
    model.config.id2label = {0: "four", 1: "three", 2: "two", 3: "one", 4: "none"}
    model.save_pretrained(folder)
    assert refused(recipe, folder) == (
        ": its classes are four, three, two, one, none, and those of the data 1 star, 2 stars, 3 stars, 4 stars, 5 stars. "
        "Names and order must be the same; task.label_names sets them."
    )


def test_a_teacher_with_another_tokenizer_is_refused(recipe, folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["zzz"])
    tokenizer.save_pretrained(folder)
    assert refused(recipe, folder) == (
        ": its tokenizer has another vocabulary than that of task.model (301 and 300 tokens), so they do not read the same. "
        "Choose two models of one family."
    )


def test_a_model_that_was_not_trained_for_the_task_is_refused(recipe, folder):
    recipe.task.build_model().bert.save_pretrained(folder)
    assert (
        refused(recipe, folder) == ": it has no classifier.bias, so it was not trained for what SequenceClassification learns."
    )
    (folder / "config.json").unlink()
    assert refused(recipe, folder).startswith(" is no model that SequenceClassification can load: ConfigError: ")


def test_a_teacher_for_another_kind_of_labels_is_refused(recipe, folder):
    model = recipe.task.build_model()
    model.config.problem_type = "multi_label_classification"
    model.save_pretrained(folder)
    assert refused(recipe, folder) == (
        ": it was trained for problem_type=multi_label_classification, and the student learns single_label_classification."
    )


def test_a_teacher_that_is_told_pairs_apart_by_token_types_is_refused_if_the_student_is_not(recipe, folder, monkeypatch):
    model = recipe.task.build_model()
    recipe.task.save(model, folder)
    monkeypatch.setattr(type(recipe.task), "text_columns_read", ["text", "text"])
    assert teach(recipe, folder).commits == {}
    monkeypatch.setitem(vars(recipe.task), "named_config", type(model.config)(type_vocab_size=1))
    assert refused(recipe, folder) == (
        ": the teacher tells the two texts of a pair apart by token types, and the student has none."
    )


def test_titles_can_have_a_teacher_although_they_are_read_from_two_columns(tmp_path):
    recipe = Recipe.load("bigbird_demo", "task.max_train_samples=8", "task.max_eval_samples=2")
    recipe.task.datasets()
    recipe.task.save(recipe.task.build_model(), tmp_path / "model")
    assert teach(recipe, tmp_path / "model").commits == {}


def test_a_run_that_is_not_there_is_refused_with_the_command_that_trains_it(recipe):
    assert refused(recipe, "outputs/chats_demo") == (
        ": there is no such folder. Name a run's output folder, or one of save_pretrained. Recipe chats_demo trains one: "
        "hftune train recipe=chats_demo"
    )


def test_a_teacher_that_cannot_compute_the_samples_is_refused(recipe, folder):
    model = recipe.task.build_model()
    model.config.max_position_embeddings = 4
    type(model)(model.config).save_pretrained(folder)
    data, teacher = recipe.task.datasets()["train"], teach(recipe, folder)
    with pytest.raises(ConfigError, match=r"it cannot compute the samples of this task \("):
        teacher.check(data, [0])
    teacher.item_logits = lambda *given: (_ for _ in ()).throw(DataError("as it is"))
    with pytest.raises(DataError, match=r"^as it is$"):
        teacher.check(data, [0])
    teacher.config.teacher_weight = 0.25
    with pytest.raises(ConfigError, match="it has 2 classes or words, and 3 are learned"):
        teacher.item_logits = lambda *given: torch.zeros(1, 2)
        teacher.mixed(torch.tensor(0.0), CausalLMOutput(logits=torch.zeros(1, 3)), torch.tensor([0]), {})


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("mnist_demo", (), "train.teacher=x/y: ImageClassification cannot learn from a teacher, as it has no item_logits."),
        (
            "chats_demo",
            ("parallel.pipeline_stages=2",),
            "parallel.pipeline_stages=2 does not work with train.teacher, which the stages of a pipeline cannot follow. Set it to 1.",
        ),
        (
            "chats_demo",
            ("parallel.context=2",),
            "parallel.context=2 does not work with train.teacher, which processes that share tokens cannot follow. Set it to 1.",
        ),
    ],
)
def test_what_cannot_have_a_teacher_is_refused_before_torch_is_imported(name, words, message):
    with pytest.raises(ConfigError) as caught:
        Recipe.load(name, "train.teacher=x/y", *words).validate()
    assert message in caught.value.problems


@dataclass
class OtherLoss(Chats):
    def loss(self, outputs, target):
        return 2 * super().loss(outputs, target)


class OwnItems(OtherLoss):
    def item_logits(self, outputs, target):
        return super().item_logits(outputs, target)


def test_a_loss_of_ones_own_needs_items_of_its_own_for_a_teacher():
    recipe = Recipe.load("chats_demo", "train.teacher=x/y")
    fields = {each.name: getattr(recipe.task, each.name) for each in dataclasses.fields(recipe.task)}
    with pytest.raises(ConfigError, match="OtherLoss has a loss or num_items of its own"):
        replace(recipe, task=OtherLoss(**fields)).validate()
    replace(recipe, task=OwnItems(**fields)).validate()


def test_an_empty_name_is_no_teacher():
    with pytest.raises(ConfigError, match=r"train.teacher is empty\. Name a model, or set it to null"):
        Recipe.load("chats_demo", "train.teacher=''").validate()


@pytest.mark.parametrize(
    "word", ["teacher_weight=0.1", "teacher_temperature=3.0", "teacher_revision='main'", "reference_revision='main'"]
)
def test_keys_of_a_second_model_without_one_are_refused(word):
    with pytest.raises(ConfigError, match=f"train.{word} needs train.{word.partition('_')[0]}"):
        Recipe.load("yelp_demo", f"train.{word}").validate()
    Recipe.load("distillation_demo", "train.teacher=null").validate()


def test_the_loss_is_a_mixture_and_dummies_do_not_count():
    class Two:
        def item_logits(self, outputs, target):
            return outputs

    config, theirs, own = TrainConfig(teacher="x", teacher_weight=0.25), torch.randn(3, 2), torch.randn(3, 2)
    teacher = Teacher(Two(), config, torch.nn.Linear(1, 1))
    teacher.item_logits = lambda *given: theirs
    kl = float(divergence(own, theirs, 2.0))
    assert teacher.mixed(torch.tensor(8.0), own, None, {}) == pytest.approx(0.75 * 8 + 0.25 * 4 * kl, rel=1e-6)
    teacher.mixed(torch.tensor(8.0), own, None, {}, weight=0)
    alone = Teacher(Two(), replace(config, teacher_weight=1.0), torch.nn.Linear(1, 1))
    alone.item_logits = lambda *given: theirs
    assert alone.mixed(torch.tensor(torch.inf), own, None, {}) == pytest.approx(4 * kl, rel=1e-6)
    assert float(teacher.total) == pytest.approx(kl, rel=1e-6)


@pytest.mark.parametrize(("digest", "expected"), [("a" * 64, []), ("b" * 64, ["versions"])])
def test_a_replay_lists_a_teacher_from_the_hub_only_if_it_has_changed(digest, expected):
    commits = {"task.model": "1", "train.teacher": "2"}
    replayer = SimpleNamespace(
        terms=SimpleNamespace(start={"commits": commits, "teacher": "a" * 64, "plan": {}}),
        environment=dict,
        task=SimpleNamespace(commits=lambda: {"task.model": "1"}),
        strategy=SimpleNamespace(teacher=Teacher(None, TrainConfig(), torch.nn.Linear(1, 1), digest)),
        parts=SimpleNamespace(commits={"train.teacher": "2"}),
        change=SimpleNamespace(without=()),
        digests={"train data": "all:0"},
        step=1,
    )
    assert [found.kind for found in environment_differences(replayer)] == expected
