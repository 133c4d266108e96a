"""What is refused of a launcher, or of variables that none sets, before a model is loaded; and what only looks like it."""

import os
import re
import sys

import pytest

import hftune.run
from hftune import ConfigError, Recipe
from hftune.distributed.preflight import check_launch, check_launcher, launch_options
from hftune.distributed.process_info import check_environment

GIVEN = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture
def environment(monkeypatch):
    """Return a function that sets these variables and no others of a launcher."""
    for name in (*GIVEN, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def use(**values: str) -> None:
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return use


def refused(function, *arguments) -> str:
    with pytest.raises(ConfigError) as caught:
        function(*arguments)
    return str(caught.value)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"WORLD_SIZE": ""}, "WORLD_SIZE='' .* not a whole number.* unset it"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two' .* not a whole number.* unset it"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 .* RANK, MASTER_ADDR, MASTER_PORT are not set.* unset WORLD_SIZE"),
        ({**GIVEN, "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": ""}, "WORLD_SIZE=2 .* MASTER_ADDR is not set"),
        ({**GIVEN, "RANK": "2"}, "RANK=2 .* must be below WORLD_SIZE=2"),
        ({"ACCELERATE_USE_CPU": "banana"}, "ACCELERATE_USE_CPU=banana .* neither true nor false"),
        ({"SLURM_STEP_NUM_TASKS": "8"}, "srun started 8 processes .* `hftune slurm` .* srun --ntasks-per-node=1 torchrun"),
        (
            {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"},
            "mpirun started 2 processes .* torchrun --nproc_per_node N",
        ),
    ],
)
def test_variables_that_no_launcher_sets_are_refused_in_one_sentence(environment, capsys, values, says):
    environment(**values)
    message = refused(check_environment)
    assert re.match(says, message)
    assert hftune.run.main(["recipe=yelp_demo"]) == 2
    assert capsys.readouterr().err == f"hftune: {message}\n"


def test_leaving_needs_no_number_either(environment):
    environment(WORLD_SIZE="two")
    with pytest.raises(SystemExit):
        hftune.run.leave(2)


@pytest.mark.parametrize(
    "values",
    [
        {},
        GIVEN,
        {"WORLD_SIZE": "1", "SLURM_STEP_NUM_TASKS": "8"},  # on purpose, as in a sweep
        {**GIVEN, "SLURM_STEP_NUM_TASKS": "2"},  # torchrun under srun
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "8"},
        {"SLURM_NTASKS": "8"},  # a batch script's own environment, which starts one process
        {"ACCELERATE_USE_CPU": "1"},
    ],
)
def test_what_launchers_do_set_is_not_refused(environment, values):
    environment(**values)
    check_environment()


@pytest.mark.parametrize(
    ("name", "value", "word", "says"),
    [
        ("MIXED_PRECISION", "bf16", "train.mixed_precision=no", "Set train.mixed_precision=bf16, or mixed_precision: 'no'"),
        ("MIXED_PRECISION", "fp8", "train.mixed_precision=bf16", "Set mixed_precision: 'no' in the launcher's config"),
        ("DYNAMO_BACKEND", "INDUCTOR", "train.compile=false", "Set train.compile=true, which .* Set dynamo_backend: 'no'"),
        ("DYNAMO_BACKEND", "EAGER", "train.compile=true", r"train\.compile=true compiles with inductor\. Set dynamo_backend"),
    ],
)
def test_options_of_the_launcher_that_contradict_the_recipe_are_refused(monkeypatch, name, value, word, says):
    monkeypatch.setenv(f"ACCELERATE_{name}", value)
    asks = f"The launcher asks for {name.lower()} {value.lower()}, and the recipe for {word}. The recipe decides. "
    assert re.match(f"{re.escape(asks)}.*{says}", refused(check_launcher, Recipe.load("yelp_demo", word)))


def test_a_parallelism_config_is_refused_with_what_does_the_same(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    said = refused(check_launcher, Recipe.load("yelp_demo"))
    assert "parallelism_config is not supported" in said and "parallel.pipeline_stages=2" in said and "fsdp.yaml" in said


def test_what_accelerate_launch_sets_by_itself_contradicts_no_recipe(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "NO")
    check_launcher(Recipe.load("yelp_demo", "train.mixed_precision=bf16", "train.compile=true"))
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    check_launcher(Recipe.load("yelp_demo", "train.mixed_precision=bf16", "train.compile=true"))


def test_steps_to_accumulate_are_the_recipes(monkeypatch):
    command = ["python", "/bin/accelerate", "launch", "--gradient_accumulation_steps", "4", "script.py"]
    options = launch_options(command)
    monkeypatch.setattr("hftune.distributed.preflight.launch_options", lambda _: options)
    assert re.search("--gradient_accumulation_steps 4, .* train.batch_size .* train.micro_batch_size", refused(check_launch))


def test_too_few_processes_are_refused_before_the_training_is_imported(environment, monkeypatch):
    options = launch_options(["/bin/accelerate", "launch", "--num_processes", "2", "script.py"])
    monkeypatch.setattr("hftune.distributed.preflight.launch_options", lambda _: options)
    monkeypatch.setitem(sys.modules, "hftune.training", None)  # cannot be imported
    environment()
    said = refused(hftune.run.train_valid, Recipe.load("yelp_demo"))
    assert said.startswith("accelerate launch was asked for 2 processes and started only one: ")


@pytest.mark.parametrize(("local", "expected"), [("2", "lo"), (None, None)])
def test_only_processes_that_are_all_on_this_machine_are_kept_off_the_network(environment, monkeypatch, local, expected):
    """Without LOCAL_WORLD_SIZE, as Kubernetes' operator starts them, the others may be anywhere."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # so that it is put back
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr("hftune.distributed.network.interfaces", lambda: {"lo": ["127.0.0.1"], "eth0": ["10.1.0.5"]})
    environment(**GIVEN, **({} if local is None else {"LOCAL_WORLD_SIZE": local}))
    check_launch()
    assert os.environ.get("GLOO_SOCKET_IFNAME") == expected


@pytest.mark.parametrize("key", ["dead_after_s", "stall_after_s"])
@pytest.mark.parametrize("value", ["inf", "1e10"])
def test_bounds_of_time_are_finite(key, value):
    said = refused(Recipe.load, "yelp_demo", f"train.{key}={value}")
    assert said.startswith(f"train.{key}=") and "must be in [3, 1e+08]" in said
    assert said.endswith(" null: no limit.") == (key == "stall_after_s")
