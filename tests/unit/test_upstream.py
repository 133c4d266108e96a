"""The private or undocumented names of other packages that hftune uses, and a check that each one still behaves as expected.

An upgrade that breaks one of them fails here, with the reason, instead of on a user's machine. A new private name needs a row in
TABLE; a row whose name is no longer used must be removed.
"""

import argparse
import ast
import importlib
import inspect
import sys
import threading
from collections import namedtuple
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn

HFTUNE = Path(__file__).parents[2] / "hftune"


class Upstream(NamedTuple):
    name: str
    """As it is written in hftune: the full path of an import, or an attribute."""
    used_in: str
    """Packages or modules of hftune, separated by spaces; at least one of them uses it."""
    why: str
    until: str
    """Upstream issue, version or change that would let us stop."""
    touch: Callable[[], None]
    """Fails if the name does not behave as hftune expects."""


def imported(path):
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def exists(*paths):
    return lambda: [imported(path) for path in paths]


def takes(path, *parameters):
    """The function has these parameters, or takes any."""

    def touch():
        known = inspect.signature(imported(path)).parameters
        assert set(parameters) <= set(known), f"{path}{inspect.signature(imported(path))}"

    return touch


# torch: modules and tensors


def parsers_list_their_options():
    parser = argparse.ArgumentParser()
    option = parser.add_argument("--device", choices=("cpu", "cuda"))
    assert option in parser._actions and (option.option_strings, option.choices) == (["--device"], ("cpu", "cuda"))


def compiled_models_have_a_call():
    model = nn.Linear(1, 1)
    assert model._compiled_call_impl is None
    model.compile()
    assert model._compiled_call_impl is not None


def subclasses_of_tensors_can_be_taken_for_tensors():
    class Own(torch.Tensor):
        pass

    with torch._C.DisableTorchFunctionSubclass():
        assert type(torch.zeros(2).as_subclass(Own) + 1) is torch.Tensor


def modules_apply_a_function_to_their_tensors():
    layer = nn.Linear(2, 2, device="meta")
    layer._apply(lambda value: torch.zeros_like(value, device="cpu"))
    assert not any(value.is_meta for value in layer.parameters())


def views_are_distinguished_from_copies():
    value = torch.zeros(2, 2, requires_grad=True) * 1
    assert value[:1]._is_view() and not value._is_view()


def callbacks_end_a_backward_pass_in_the_order_in_which_they_were_added():
    seen = []
    queue = torch.autograd.Variable._execution_engine.queue_callback
    weight = torch.ones(1, requires_grad=True)
    weight.register_post_accumulate_grad_hook(lambda _: seen.append("gradient") or queue(lambda: seen.append("second")))
    loss = weight * 2
    loss.register_hook(lambda _: queue(lambda: seen.append("first")))
    loss.backward()
    assert seen == ["gradient", "first", "second"]


def flash_attention_on_the_cpu_and_its_backward():
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    query, key = torch.randn(1, 1, 4, 8), torch.randn(1, 1, 6, 8)
    mask = torch.zeros(1, 1, 4, 6)
    output, logsumexp = forward(query, key, key, attn_mask=mask)
    assert output.shape == query.shape
    options = {"dropout_p": 0.0, "is_causal": False, "attn_mask": mask}
    gradients = backward(output, query, key, key, output, logsumexp, **options)
    assert [value.shape for value in gradients] == [query.shape, key.shape, key.shape]


# torch: tensors without values


def values_are_refused_without_values():
    from torch._subclasses.fake_tensor import FakeTensorMode

    from hftune.planning.memory import NEEDS_VALUES

    with FakeTensorMode():
        value = torch.ones(3)
        for ask in (lambda: value.sum().item(), lambda: value.nonzero()):
            with pytest.raises(NEEDS_VALUES):
                ask()


def each_operation_is_dispatched():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += 1
            return func(*args, **(kwargs or {}))

    with Seen() as seen:
        torch.zeros(2) + 1
    assert seen.count == 2


def leaves_of_nested_values():
    from torch.utils._pytree import tree_leaves

    assert tree_leaves({"a": [1, (2,)], "b": 3}) == [1, 2, 3]


def nested_values_changed_at_their_leaves():
    from torch.utils._pytree import tree_map

    assert tree_map(lambda value: value + 1, {"a": [1, (2,)], "b": 3}) == {"a": [2, (3,)], "b": 4}


# torch.distributed


def a_group_has_a_default_store():
    from torch.distributed.distributed_c10d import _get_default_store

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        _get_default_store().set("key", "value")
        assert _get_default_store().get("key") == b"value"
    finally:
        torch.distributed.destroy_process_group()


def a_group_takes_another_timeout():
    from torch.distributed.distributed_c10d import _get_default_group, _set_pg_timeout

    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=5)
    )
    try:
        _set_pg_timeout(timedelta(hours=1))
        assert _get_default_group()._get_backend(torch.device("cpu")).options._timeout == timedelta(hours=1)
    finally:
        torch.distributed.destroy_process_group()


def torchrun_finds_static_rendezvous_methods():
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    assert {"get_backend", "next_rendezvous"} <= set(vars(StaticTCPRendezvous))
    assert parse_rendezvous_endpoint("host:7", 1) == ("host", 7)


def agents_exchange_sizes_and_ranks_in_their_store():
    from torch.distributed.elastic.agent.server.api import SimpleElasticAgent, _RoleInstanceInfo

    exchange = inspect.getsource(SimpleElasticAgent._assign_worker_ranks)
    assert "torchelastic/role_info/" in exchange and 'json.loads(store.get(f"{ASSIGNED_RANKS_PREFIX}{group_rank}"))' in exchange
    assert _RoleInstanceInfo.deserialize(b'{"role": "default", "rank": 0, "local_world_size": 2}').local_world_size == 2
    assert "store_util.barrier" in inspect.getsource(SimpleElasticAgent._exit_barrier)


# accelerate


def sharded_modules_know_what_is_gathered():
    state = imported("torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState")
    group = imported("torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup")
    assert state()._fsdp_param_group is None and callable(state._lazy_init)
    assert callable(group._to_sharded) and callable(imported("torch.distributed.fsdp.FSDPModule")._get_fsdp_state)


def generation_asks_whether_fsdp_has_a_module():
    module, asked = nn.Linear(1, 1), imported("transformers.distributed.fsdp.is_fsdp_managed_module")
    for answer in (True, False):
        module._is_fsdp_managed_module = answer
        assert asked(module) == answer


def state_is_shared_and_can_be_reset():
    from accelerate.state import AcceleratorState, PartialState

    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(cpu=True)
    assert "distributed_type" in PartialState._shared_state
    AcceleratorState._reset_state(reset_partial_state=True)
    assert not PartialState._shared_state


def out_of_memory_is_recognised_by_its_text():
    from accelerate.utils.memory import should_reduce_batch_size

    assert should_reduce_batch_size(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert should_reduce_batch_size(RuntimeError("[enforce fail] . DefaultCPUAllocator: can't allocate memory: you tried"))
    assert not should_reduce_batch_size(RuntimeError("shapes do not fit"))


def the_launchers_own_parser_reads_its_options():
    from accelerate.commands.config.config_args import default_config_file, load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    options = launch_command_parser().parse_args(["--num_processes", "3", "-m", "hftune.run", "recipe=yelp"])
    assert (options.num_processes, options.config_file, options.cpu) == (3, None, False)
    assert default_config_file and callable(load_config_from_file)


# transformers, datasets


def a_class_says_whether_its_models_have_adapters():
    from transformers.integrations import PeftAdapterMixin

    assert PeftAdapterMixin._hf_peft_config_loaded is False


def models_are_made_from_a_config():
    from transformers import AutoConfig, AutoModelForCausalLM, BertConfig, BertForMaskedLM

    config = AutoConfig.for_model("gpt2", n_layer=1, n_head=1, n_embd=2, vocab_size=3)
    assert AutoModelForCausalLM.from_config(config).config.n_layer == 1
    small = BertConfig(num_hidden_layers=1, hidden_size=2, num_attention_heads=1, intermediate_size=2, vocab_size=3)
    assert BertForMaskedLM._from_config(small, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert small._attn_implementation


def slow_tokenizers_cut_words_in_a_method():
    from transformers.models.bert.tokenization_bert_legacy import BasicTokenizer, BertTokenizerLegacy

    assert {"_tokenize", "tokenize"} <= set(dir(BertTokenizerLegacy))
    assert callable(BasicTokenizer)


def fast_tokenizers_leave_texts_to_their_backend():
    from transformers import BertTokenizer, PreTrainedTokenizerFast

    assert BertTokenizer._encode_plus is PreTrainedTokenizerFast._encode_plus
    assert "self._tokenizer.encode_batch(" in inspect.getsource(PreTrainedTokenizerFast._encode_plus)


def auto_classes_list_their_configs():
    import transformers

    known = transformers.AutoModelForSemanticSegmentation._model_mapping
    assert transformers.SegformerConfig in known and transformers.BertConfig not in known


def data_sets_have_fingerprint_and_indices():
    import datasets

    rows = datasets.Dataset.from_dict({"a": [1, 2, 3]})
    assert isinstance(rows._fingerprint, str) and rows._indices is None
    chosen = rows.select([2, 0])
    assert chosen._fingerprint != rows._fingerprint
    assert [place.as_py() for place in chosen._indices.column(0)] == [2, 0]
    chosen = rows._select_with_indices_mapping([1, 2])
    assert chosen["a"] == [2, 3] and [place.as_py() for place in chosen._indices.column(0)] == [1, 2]


# optional packages


def spark_reaches_java():
    pyspark = pytest.importorskip("pyspark")

    assert "_jsc" in inspect.getsource(pyspark.SparkContext)
    from pyspark.sql.utils import is_remote

    assert callable(is_remote)


def mlflow_watches_the_system_and_resolves_tags():
    pytest.importorskip("mlflow")
    takes("mlflow.system_metrics.system_metrics_monitor.SystemMetricsMonitor", "run_id", "resume_logging", "tracking_uri")()
    takes("mlflow.tracking.context.registry.resolve_tags")()


def wandb_refuses_a_wrong_key():
    pytest.importorskip("wandb")
    takes("wandb.login", "prompt")()
    exists("wandb.errors.AuthenticationError")()


def wandb_writes_its_file_each_second_in_a_process_of_its_own():
    wandb = pytest.importorskip("wandb")
    assert wandb.Settings(x_transaction_log_flush_interval=1).x_transaction_log_flush_interval == 1
    from wandb.util import get_core_path

    assert Path(get_core_path()).name == "wandb-core"


def varlen_attention_is_called_below_its_public_function():
    from torch.nn.attention.varlen import varlen_attn

    assert "dropout" not in inspect.signature(varlen_attn).parameters
    flash, efficient = torch.ops.aten._flash_attention_forward, torch.ops.aten._efficient_attention_forward
    names = [[argument.name for argument in kernel.default._schema.arguments] for kernel in (flash, efficient)]
    assert {"cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal", "window_size_left"} <= {*names[0]}
    assert {"cu_seqlens_q", "max_seqlen_q", "dropout_p", "custom_mask_type", "compute_log_sumexp"} <= {*names[1]}


def halves_of_a_backward_pass_are_functions():
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

    halves = [[*inspect.signature(half).parameters] for half in (stage_backward_input, stage_backward_weight)]
    assert halves[0] == ["stage_outputs_or_loss", "output_grads", "input_values", "weights"]
    assert halves[1][:2] == ["weights", "param_groups"]


def models_say_whether_their_attention_can_be_replaced():
    from transformers import BertModel, BloomModel

    assert BertModel._can_set_attn_implementation() and not BloomModel._can_set_attn_implementation()


def a_plans_tensors_are_fake_ones():
    from torch._subclasses import FakeTensor, FakeTensorMode

    with FakeTensorMode():
        assert isinstance(torch.zeros(1) + 1, FakeTensor)


def experts_have_shapes_only_where_they_do_without_torchs_operation():
    from torch._subclasses import FakeTensorMode
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    from hftune.planning.memory import experts_by_shape

    config = MixtralConfig(hidden_size=16, intermediate_size=16, num_local_experts=4, experts_implementation="grouped_mm")
    with FakeTensorMode():
        experts, choices = MixtralExperts(config), torch.zeros(8, 2)
        with experts_by_shape():
            assert experts(torch.zeros(8, 16), choices.long(), choices).shape == (8, 16)
        with pytest.raises(RuntimeError, match="BF16"):  # until then
            experts(torch.zeros(8, 16), choices.long(), choices)


def persistent_workers_are_shut_down_by_their_iterator():
    from torch.utils.data import DataLoader

    loader = DataLoader([1, 2])
    assert loader._iterator is None
    from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

    assert callable(_MultiProcessingDataLoaderIter._shutdown_workers)


# Python


def threads_show_their_frames():
    assert threading.get_ident() in sys._current_frames()


def named_tuples_are_copied_with_changes():
    assert namedtuple("Pair", "a b")(1, 2)._replace(b=3) == (1, 3)


NO_ISSUE = "no public name yet, no upstream issue known"
TABLE = [
    Upstream(
        "_encode_plus",
        "data",
        "words are tokenized once by the backend of a tokenizer whose class does nothing else to them",
        NO_ISSUE,
        fast_tokenizers_leave_texts_to_their_backend,
    ),
    Upstream(
        "_actions",
        "commands cli",
        "the completion lists the options of each command, of which argparse has no public list",
        NO_ISSUE,
        parsers_list_their_options,
    ),
    Upstream(
        "_C",
        "models",
        "torch.compiler and torch's notes on extending name DisableTorchFunctionSubclass here",
        "a public path",
        subclasses_of_tensors_can_be_taken_for_tensors,
    ),
    Upstream(
        "_apply",
        "strategies",
        "puts values into sharded parameters on the meta device, and FSDP and tied weights notice",
        "pytorch: to_empty for some of a model's tensors",
        modules_apply_a_function_to_their_tensors,
    ),
    *(
        Upstream(
            name,
            "strategies",
            "processes that generate on shards gather a unit when one of them needs it",
            "pytorch: FSDPModule says whether it is gathered",
            sharded_modules_know_what_is_gathered,
        )
        for name in ("_get_fsdp_state", "_fsdp_param_group", "_lazy_init", "_to_sharded")
    ),
    Upstream(
        "_is_fsdp_managed_module",
        "strategies",
        "transformers would have all processes generate equally many tokens",
        NO_ISSUE,
        generation_asks_whether_fsdp_has_a_module,
    ),
    Upstream(
        "_compiled_call_impl",
        "strategies",
        "hooks would break the graph of a model that model.compile() has compiled",
        NO_ISSUE,
        compiled_models_have_a_call,
    ),
    *(
        Upstream(
            name,
            "models",
            "flash attention for texts of unequal length with dropout, which torch.nn.attention.varlen sets to 0; and float32",
            NO_ISSUE,
            varlen_attention_is_called_below_its_public_function,
        )
        for name in ("_flash_attention_forward", "_efficient_attention_forward")
    ),
    *(
        Upstream(
            f"torch.distributed.pipelining._backward.stage_backward_{half}",
            "planning",
            "what zero_bubble keeps between the halves of a backward pass: its stages offer them only with processes",
            NO_ISSUE,
            halves_of_a_backward_pass_are_functions,
        )
        for half in ("input", "weight")
    ),
    Upstream(
        "_can_set_attn_implementation",
        "models",
        "set_attn_implementation only warns where attention does not go through transformers' interface",
        NO_ISSUE,
        models_say_whether_their_attention_can_be_replaced,
    ),
    Upstream(
        "torch._subclasses.FakeTensor",
        "models",
        "a plan's dropout has no random numbers to draw",
        NO_ISSUE,
        a_plans_tensors_are_fake_ones,
    ),
    *(
        Upstream(
            name,
            "strategies",
            "a DataLoader's persistent workers may outlive it, in the traceback of a failure",
            NO_ISSUE,
            persistent_workers_are_shut_down_by_their_iterator,
        )
        for name in ("_iterator", "_shutdown_workers")
    ),
    Upstream(
        "_execution_engine",
        "strategies",
        "the moment at which a backward pass is computed here, before DDP waits for the other processes",
        NO_ISSUE,
        callbacks_end_a_backward_pass_in_the_order_in_which_they_were_added,
    ),
    Upstream(
        "_is_view",
        "strategies",
        "zero-bubble schedules detach a stage's output in place",
        NO_ISSUE,
        views_are_distinguished_from_copies,
    ),
    *(
        Upstream(
            f"_scaled_dot_product_flash_attention_for_cpu{end}",
            "models",
            "the kernel of scaled_dot_product_attention, over keys that the backward pass gathers a second time",
            "FlexAttention's training on CPUs (torch 2.13 refuses it)",
            flash_attention_on_the_cpu_and_its_backward,
        )
        for end in ("", "_backward")
    ),
    *(
        Upstream(
            f"torch._dynamo.exc.{name}",
            "models",
            "what a kernel raises that torch.compile cannot build",
            NO_ISSUE,
            exists(f"torch._dynamo.exc.{name}"),
        )
        for name in ("FailOnRecompileLimitHit", "TorchDynamoException")
    ),
    Upstream(
        "torch._subclasses.fake_tensor.FakeTensor",
        "models",
        "a loss that leaves out tokens without a target cannot count them in a plan",
        "a public FakeTensorMode",
        values_are_refused_without_values,
    ),
    Upstream(
        "_can_use_grouped_mm",
        "planning",
        "hftune plan computes experts in float32 with tensors that have no values",
        "torch's grouped_mm has shapes for what it computes (2.13: for bf16 alone)",
        experts_have_shapes_only_where_they_do_without_torchs_operation,
    ),
    *(
        Upstream(
            f"torch._subclasses.fake_tensor.{name}",
            "planning",
            "hftune plan computes a step with tensors that have no values",
            "a public FakeTensorMode",
            values_are_refused_without_values,
        )
        for name in (
            "FakeTensorMode",
            "DataDependentOutputException",
            "DynamicOutputShapeException",
            "UnsupportedFakeTensorException",
            "UnsupportedOperatorException",
        )
    ),
    Upstream(
        "torch.utils._python_dispatch.TorchDispatchMode",
        "planning",
        "torch.distributed._tools.mem_tracker counts the same bytes ten times as slowly",
        "documented in torch's notes on extending, without a public path",
        each_operation_is_dispatched,
    ),
    Upstream(
        "torch.utils._pytree.tree_leaves",
        "planning commands models tasks",
        "the tensors of any outputs, and of what rows are made of",
        NO_ISSUE,
        leaves_of_nested_values,
    ),
    Upstream(
        "torch.utils._pytree.tree_map",
        "planning replay models tasks",
        "one sample of a batch, detached outputs, and what a function of unread tensors is given, whatever their nesting",
        NO_ISSUE,
        nested_values_changed_at_their_leaves,
    ),
    Upstream(
        "torch.distributed.distributed_c10d._get_default_store",
        "distributed",
        "the heartbeat uses the store of the process group, to which all processes are connected already",
        NO_ISSUE,
        a_group_has_a_default_store,
    ),
    Upstream(
        "torch.distributed.distributed_c10d._set_pg_timeout",
        "distributed",
        "an elastic group connects within seconds or not at all, and may then compute for an hour",
        "a way to end Gloo's wait for a process that is lost while the others connect to it",
        a_group_takes_another_timeout,
    ),
    Upstream(
        "StaticTCPRendezvous",
        "launchers",
        "the rendezvous backend hftune is the static one with a wait that says who is missing",
        "pytorch/pytorch#168242, closed unmerged",
        torchrun_finds_static_rendezvous_methods,
    ),
    Upstream(
        "torchelastic/role_info/",
        "elastic",
        "each agent counts its own ranks, so that none waits for the others of a round that is over",
        NO_ISSUE,
        agents_exchange_sizes_and_ranks_in_their_store,
    ),
    *(
        Upstream(name, "distributed", why, until, state_is_shared_and_can_be_reset)
        for name, why, until in (
            ("_reset_state", "a notebook may train twice, with different precisions", NO_ISSUE),
            ("_shared_state", "FSDP on CPUs", "accelerate: MULTI_CPU in AcceleratorState's list of FSDP's kinds"),
        )
    ),
    Upstream(
        "should_reduce_batch_size",
        "strategies",
        "on CPUs, only the text of a RuntimeError says that memory ran out",
        "a torch.OutOfMemoryError on CPUs",
        out_of_memory_is_recognised_by_its_text,
    ),
    Upstream(
        "launch_command_parser",
        "distributed",
        "finds out how many processes the launcher was asked for",
        "a launcher that sets it in the environment",
        the_launchers_own_parser_reads_its_options,
    ),
    Upstream(
        "_from_config",
        "models",
        "what from_config calls; classes that are no Auto class have only this",
        NO_ISSUE,
        models_are_made_from_a_config,
    ),
    Upstream(
        "_model_mapping",
        "models",
        "which kinds of models an Auto class knows; the public mappings are not those of the class",
        NO_ISSUE,
        auto_classes_list_their_configs,
    ),
    Upstream(
        "_hf_peft_config_loaded",
        "models",
        "save_pretrained writes adapters alone where it is set; a merged model is a plain one again",
        "transformers: a method that merges and removes adapters",
        a_class_says_whether_its_models_have_adapters,
    ),
    Upstream(
        "_attn_implementation",
        "models",
        "masks differ for eager attention and for SDPA",
        NO_ISSUE,
        models_are_made_from_a_config,
    ),
    Upstream("_tokenize", "data", "jieba segments words before WordPiece", NO_ISSUE, slow_tokenizers_cut_words_in_a_method),
    Upstream(
        "_fingerprint",
        "data tasks",
        "keys of caches; the only digest of a data set that needs no reading",
        "datasets: a public fingerprint",
        data_sets_have_fingerprint_and_indices,
    ),
    Upstream("_indices", "data", "messages name rows of the file", NO_ISSUE, data_sets_have_fingerprint_and_indices),
    Upstream(
        "_select_with_indices_mapping",
        "data",
        "rows that follow each other know their numbers, too",
        "datasets: select that keeps indices",
        data_sets_have_fingerprint_and_indices,
    ),
    Upstream("_jsc", "spark launchers", "Spark's free slots, without a wait of many minutes", NO_ISSUE, spark_reaches_java),
    Upstream(
        "SystemMetricsMonitor",
        "tracking",
        "mlflow.start_run would start it only for runs that it makes active",
        NO_ISSUE,
        mlflow_watches_the_system_and_resolves_tags,
    ),
    Upstream(
        "resolve_tags",
        "tracking",
        "the tags that mlflow.start_run gives a run",
        NO_ISSUE,
        mlflow_watches_the_system_and_resolves_tags,
    ),
    Upstream(
        "x_transaction_log_flush_interval",
        "tracking",
        "a killed run's file has all but its last second, and leaving a dead server ends that process",
        NO_ISSUE,
        wandb_writes_its_file_each_second_in_a_process_of_its_own,
    ),
    Upstream("wandb.errors", "tracking", "a wrong key is refused before training", NO_ISSUE, wandb_refuses_a_wrong_key),
    Upstream(
        "_exit", "run distributed launchers elastic", "documented despite its name", "nothing to wait for", exists("os._exit")
    ),
    Upstream(
        "_replace", "commands", "documented despite its name", "nothing to wait for", named_tuples_are_copied_with_changes
    ),
    Upstream("_current_frames", "distributed", "documented despite its name", "nothing to wait for", threads_show_their_frames),
]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_an_upstream_name_behaves_as_hftune_expects(row):
    try:
        row.touch()
    except (AttributeError, ImportError, TypeError, AssertionError) as error:
        pytest.fail(f"{row.name} (hftune/{row.used_in}: {row.why}; until: {row.until}) has changed: {error}")


def files(room):
    return [HFTUNE / f"{room}.py"] if (HFTUNE / f"{room}.py").is_file() else [*(HFTUNE / room).rglob("*.py")]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_each_row_of_the_table_is_still_needed(row):
    name, paths = row.name.rpartition(".")[2], [path for room in row.used_in.split() for path in files(room)]
    assert any(name in path.read_text() for path in paths), f"{row.name} is no longer used in {row.used_in}: remove the row"


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def private_names(tree):
    """Yield the private names of other modules that a module imports or reads; attributes of self, cls and super() are its own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("hftune"):
            paths = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (path for path in paths if any(map(is_private, path.split("."))))
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if any(map(is_private, alias.name.split("."))))
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            is_own = ast.unparse(node.value) in ("self", "cls", "super()")
            yield from () if is_own else (node.attr,)


def test_every_private_upstream_name_has_a_row():
    known = {(row.name, room) for row in TABLE for room in row.used_in.split()}
    for path in sorted(HFTUNE.rglob("*.py")):
        room = path.relative_to(HFTUNE).parts[0].removesuffix(".py")
        for name in private_names(ast.parse(path.read_text())):
            assert (name, room) in known, (
                f"{path.relative_to(HFTUNE.parent)}: {name} needs a row in TABLE, or a public name instead"
            )
