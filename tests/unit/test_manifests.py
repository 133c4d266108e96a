"""What ``hftune k8s`` and ``hftune sky`` write: of the right form, for processes that find each other, save and resume."""

from __future__ import annotations

import os
import re
import subprocess
from functools import partial
from pathlib import Path

import pytest
import yaml
from accelerate import FullyShardedDataParallelPlugin
from jsonschema import Draft7Validator
from torch.distributed.run import get_args_parser

from hftune import Recipe, cli
from hftune.config.addresses import is_address
from hftune.distributed.failure_report import STOPPED

K8S = ("k8s", "recipe=yelp", "--image", "registry.example.com/hftune:0.3.0")
SKY = ("sky", "recipe=yelp", "--nodes", "2", "--gpus", "4", "--gpu-type", "H100", "output_dir=s3://bucket/yelp")
KINDS = ("job", "jobset", "trainjob")
SIGKILL_MARGIN_S = 10
"""Between the launcher's last word and the end of a pod."""

TEXT, NUMBER, FLAG, ANY = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}, {"type": "object"}
NAMED = {"type": "object", "additionalProperties": TEXT}


def fields(required: str = "", **known: dict) -> dict:
    """A schema with these fields and no others."""
    return {"type": "object", "additionalProperties": False, "required": required.split(), "properties": known}


def lists(item: dict) -> dict:
    return {"type": "array", "items": item, "minItems": 1}


def whole(version: str, kind: str, spec: dict) -> dict:
    about = fields("name", name=TEXT, labels=NAMED, annotations=NAMED)
    return fields(
        "apiVersion kind metadata spec", apiVersion={"const": version}, kind={"const": kind}, metadata=about, spec=spec
    )


# The part that the manifests use of: api/openapi-spec/v3 of github.com/kubernetes/kubernetes (1.37),
# config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml of github.com/kubernetes-sigs/jobset,
# manifests/base/crds of github.com/kubeflow/trainer, and sky/utils/schemas.py of github.com/skypilot-org/skypilot (0.14.1).
ENV = fields("name value", name=TEXT, value=TEXT)
CONTAINER = fields(
    "name image command",
    **{
        "name": TEXT,
        "image": TEXT,
        "command": lists(TEXT),
        "env": lists(ENV),
        "resources": fields(limits=NAMED, requests=NAMED),
    },
    volumeMounts=lists(fields("name mountPath", name=TEXT, mountPath=TEXT)),
    readinessProbe=fields(tcpSocket=fields("port", port=NUMBER)),
)
POD = fields(
    "containers",
    **{"subdomain": TEXT, "restartPolicy": {"enum": ["Never"]}, "terminationGracePeriodSeconds": NUMBER},
    securityContext=fields(runAsNonRoot=FLAG, runAsUser=NUMBER, runAsGroup=NUMBER, fsGroup=NUMBER),
    containers=lists(CONTAINER),
    volumes=lists(
        fields("name", name=TEXT, persistentVolumeClaim=fields("claimName", claimName=TEXT), emptyDir=fields(medium=TEXT))
    ),
)
TEMPLATE = fields("spec", metadata=fields(labels=NAMED), spec=POD)
RULE = fields(
    "action",
    action={"enum": ["FailJob", "FailIndex", "Ignore", "Count"]},
    onExitCodes=fields(
        "operator values", containerName=TEXT, operator={"enum": ["In", "NotIn"]}, values=lists({**NUMBER, "not": {"const": 0}})
    ),
    onPodConditions=lists(fields("type status", type=TEXT, status=TEXT)),
)
JOB = fields(
    "template",
    **{"completionMode": {"enum": ["Indexed"]}, "completions": NUMBER, "parallelism": NUMBER, "backoffLimit": NUMBER},
    **{"backoffLimitPerIndex": NUMBER, "podReplacementPolicy": {"enum": ["Failed"]}, "template": TEMPLATE},
    successPolicy=fields("rules", rules=lists(fields(succeededCount=NUMBER))),
    podFailurePolicy=fields("rules", rules=lists(RULE)),
)
REPLICATED = fields(
    "name template", name=TEXT, replicas=NUMBER, template=fields("spec", metadata=fields(labels=NAMED), spec=JOB)
)
SET = fields("replicatedJobs", replicatedJobs=lists(REPLICATED))
SELECTOR = fields("matchLabels", matchLabels=NAMED)
SCHEMAS = {
    "Service": whole(
        "v1",
        "Service",
        fields(
            clusterIP={"const": "None"}, publishNotReadyAddresses=FLAG, selector=NAMED, ports=lists(fields("port", port=NUMBER))
        ),
    ),
    "NetworkPolicy": whole(
        "networking.k8s.io/v1",
        "NetworkPolicy",
        fields(
            "podSelector",
            podSelector=SELECTOR,
            policyTypes=lists(TEXT),
            ingress=lists(fields(**{"from": lists(fields(podSelector=SELECTOR))})),
        ),
    ),
    "Deployment": whole(
        "apps/v1",
        "Deployment",
        fields("selector template", replicas=NUMBER, strategy=fields(type=TEXT), selector=SELECTOR, template=TEMPLATE),
    ),
    "Job": whole("batch/v1", "Job", JOB),
    "JobSet": whole("jobset.x-k8s.io/v1alpha2", "JobSet", SET),
    "TrainingRuntime": whole(
        "trainer.kubeflow.org/v1alpha1",
        "TrainingRuntime",
        fields("template", mlPolicy=fields(numNodes=NUMBER), template=fields("spec", spec=SET)),
    ),
    "TrainJob": whole(
        "trainer.kubeflow.org/v1alpha1",
        "TrainJob",
        fields("runtimeRef", runtimeRef=fields("name", apiGroup=TEXT, kind=TEXT, name=TEXT), trainer=fields(numNodes=NUMBER)),
    ),
}
TASK = fields(
    "run",
    **{"name": TEXT, "num_nodes": NUMBER, "workdir": TEXT, "setup": TEXT, "run": TEXT, "envs": NAMED},
    resources=fields(
        accelerators=TEXT, cpus=TEXT, image_id=TEXT, job_recovery=fields(recover_on_exit_codes=lists(NUMBER), strategy=TEXT)
    ),
)


@pytest.fixture
def written(capsys):
    """Return a function that calls the command and returns what it writes, by kind."""

    def write(*words: str) -> dict[str, dict]:
        assert cli.main([*K8S, *words]) == 0
        return {part["kind"]: part for part in yaml.safe_load_all(capsys.readouterr().out)}

    return write


def job_of(parts: dict[str, dict]) -> dict:
    """The Job's spec, whatever it is a part of."""
    if "Job" in parts:
        return parts["Job"]["spec"]
    jobs = parts["JobSet"]["spec"] if "JobSet" in parts else parts["TrainingRuntime"]["spec"]["template"]["spec"]
    (one,) = jobs["replicatedJobs"]
    assert (one["name"], one["replicas"]) == ("node", 1)
    return one["template"]["spec"]


def container_of(parts: dict[str, dict]) -> dict:
    (container,) = job_of(parts)["template"]["spec"]["containers"]
    return container


def torchrun_of(parts: dict[str, dict]):
    """What the pods' torchrun is told."""
    python, *quietly, torchrun = container_of(parts)["command"][:4]
    assert (python, quietly, torchrun) == ("python", ["-m", "hftune.launchers.quietly"], "torchrun")
    options = get_args_parser().parse_args(container_of(parts)["command"][4:])
    assert options.module and options.training_script == "hftune.run" and options.rdzv_backend == "hftune"
    return options


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "size", ["1 --gpus 1", "2 --gpus 4 --config fsdp", "1-4 --gpus 4 --memory 64Gi", "2 --cpu --processes 3"]
)
@pytest.mark.parametrize("more", ["", "--queue team output_dir=s3://bucket/run"])
def test_a_manifest_has_the_fields_that_the_schemas_know_and_starts_what_was_asked_for(written, kind, size, more):
    parts = written("--kind", kind, "--nodes", *size.split(), *more.split())
    for name, part in parts.items():
        Draft7Validator(SCHEMAS[name]).validate(part)
    job, container, options = job_of(parts), container_of(parts), torchrun_of(parts)
    most = options.nnodes.rpartition(":")[2]
    assert most == str(job["completions"]) == str(job["parallelism"])
    limits = container["resources"].get("limits", {})
    assert options.nproc_per_node == (limits["nvidia.com/gpu"] if "--gpus" in size else "3")
    recipe = Recipe.from_argv(options.training_script_args)
    recipe.validate()
    mounts, volumes = ({one["mountPath"] for one in container["volumeMounts"]}, job["template"]["spec"]["volumes"])
    has_claim = any("persistentVolumeClaim" in volume for volume in volumes)
    assert (str(Path(recipe.output_dir).parent) in mounts) == has_claim == (not is_address(recipe.output_dir))
    assert {volume["name"] for volume in volumes} == {one["name"] for one in container["volumeMounts"]}
    main = parts[{"job": "Job", "jobset": "JobSet", "trainjob": "TrainJob"}[kind]]["metadata"]
    assert main.get("labels") == ({"kueue.x-k8s.io/queue-name": "team"} if "--queue" in more else None)
    if kind == "job" and "-" in size.split()[0] and "--queue" in more:
        assert main["annotations"] == {"kueue.x-k8s.io/job-min-parallelism": "1"}


@pytest.mark.parametrize("kind", KINDS)
def test_pods_have_time_to_write_a_checkpoint_and_only_a_wrong_recipe_is_not_tried_again(written, kind):
    for nodes, action in {"2": "FailJob", "1-4": "FailIndex"}.items():
        parts = written("--kind", kind, "--nodes", nodes, "--gpus", "4", "--grace-s", "300")
        job, variables = job_of(parts), {one["name"]: one["value"] for one in container_of(parts)["env"]}
        pod = job["template"]["spec"]
        launcher_waits = int(variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
        assert launcher_waits == 280 and pod["terminationGracePeriodSeconds"] >= launcher_waits + SIGKILL_MARGIN_S
        assert pod["restartPolicy"] == "Never" and job["podReplacementPolicy"] == "Failed"
        refused, evicted, again = job["podFailurePolicy"]["rules"]
        assert (refused["action"], refused["onExitCodes"]["values"]) == (action, [2])
        assert evicted == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
        assert (again["action"], again["onExitCodes"]["values"]) == ("Ignore", [STOPPED])
        assert {rule["onExitCodes"]["containerName"] for rule in (refused, again)} == {container_of(parts)["name"]}
        assert ("backoffLimitPerIndex" in job) == ("successPolicy" in job) == (nodes == "1-4")


@pytest.mark.parametrize(("kind", "host"), zip(KINDS, ["yelp-0.yelp", "yelp-node-0-0.yelp", "yelp-node-0-0.yelp"], strict=True))
def test_pods_of_a_fixed_number_find_the_first_one_by_its_name(written, kind, host):
    parts = written("--kind", kind, "--nodes", "2", "--gpus", "1")
    pod = job_of(parts)["template"]
    assert torchrun_of(parts).rdzv_endpoint == f"{host}:29500"
    assert ("Service" in parts) == (kind == "job"), "a JobSet makes its own, of its name"
    if kind == "job":
        service = parts["Service"]["spec"]
        assert service["clusterIP"] == "None" and service["publishNotReadyAddresses"]
        assert pod["spec"]["subdomain"] == parts["Service"]["metadata"]["name"]
        assert service["selector"].items() <= pod["metadata"]["labels"].items()
    policy = parts["NetworkPolicy"]["spec"]
    assert policy["podSelector"] == policy["ingress"][0]["from"][0]["podSelector"]
    assert policy["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()


def test_pods_that_come_and_go_meet_at_one_that_stays(written):
    parts = written("--nodes", "2-4", "--gpus", "4")
    options = torchrun_of(parts)
    name, port = parts["Service"]["metadata"]["name"], parts["Service"]["spec"]["ports"][0]["port"]
    assert (options.nnodes, options.rdzv_endpoint, options.max_restarts) == ("2:4", f"{name}:{port}", 3)
    (meeting,) = parts["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert meeting["command"] == ["hftune", "meeting", str(port)] and meeting["readinessProbe"]["tcpSocket"] == {"port": port}
    labels = [parts["Deployment"]["spec"]["template"]["metadata"]["labels"], job_of(parts)["template"]["metadata"]["labels"]]
    selector = parts["Service"]["spec"]["selector"].items()
    assert selector <= labels[0].items() and not selector <= labels[1].items()
    admitted = parts["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"].items()
    assert all(admitted <= each.items() for each in labels)


def test_a_launch_configuration_for_fsdp_becomes_variables(written, monkeypatch):
    for one in container_of(written("--nodes", "2", "--gpus", "4", "--config", "fsdp_2node"))["env"]:
        monkeypatch.setenv(one["name"], one["value"])
    plugin = FullyShardedDataParallelPlugin()
    assert os.environ["ACCELERATE_USE_FSDP"] == "true"
    assert (plugin.fsdp_version, plugin.reshard_after_forward, plugin.activation_checkpointing) == (2, True, False)


def test_a_launch_configuration_of_ones_own_becomes_the_variables_that_accelerate_would_set(written, tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text(
        "distributed_type: FSDP\nfsdp_config: {fsdp_transformer_layer_cls_to_wrap: BertLayer, fsdp_min_num_params: null}"
    )
    found = {
        one["name"]: one["value"] for one in container_of(written("--nodes", "2", "--gpus", "4", "--config", str(own)))["env"]
    }
    assert {name: value for name, value in found.items() if "FSDP" in name} == {
        **{"ACCELERATE_USE_FSDP": "true", "FSDP_TRANSFORMER_CLS_TO_WRAP": "BertLayer"}
    }
    own.write_text("distributed_type: FSDP")
    assert "FSDP_TRANSFORMER_CLS_TO_WRAP" not in str(written("--nodes", "2", "--gpus", "4", "--config", str(own)))


def test_a_folder_that_the_recipe_names_in_the_pod_is_refused_and_the_volume_itself_is_not(written, capsys, tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("base: yelp_demo\noutput_dir: /data/run")
    assert cli.main(["k8s", f"recipe={recipe}", *K8S[2:], "--nodes", "1", "--cpu"]) == 2
    assert "output_dir=/data/run is in the pod, and goes with it." in capsys.readouterr().err
    command = container_of(written("--nodes", "1", "--cpu", "output_dir=/outputs"))["command"]
    assert [word for word in command if word.startswith("output_dir=")] == ["output_dir=/outputs"]


ODD = ["task.label_names=[a, 'b \"c\"']", "track.run_name=$(hostname) $$(A) $5 `it's` é;#", "train.epochs=2"]


def test_pods_get_any_words_as_they_are(written, capsys, tmp_path):
    parts = written("--nodes", "1", "--cpu", *ODD)
    # As Kubernetes reads them: $$ is $, and $(NAME) the value of a variable.
    read = partial(re.sub, r"\$\$|\$\(\w+\)", lambda found: "$" if found[0] == "$$" else "a value")
    assert [*map(read, container_of(parts)["command"])][-5:] == ["recipe=yelp", *ODD, "output_dir=/outputs/yelp"]
    assert cli.main([*K8S, "--nodes", "1", "--cpu", *ODD, "--output", str(tmp_path / "x.yaml")]) == 0
    assert capsys.readouterr().out == ""
    assert {part["kind"]: part for part in yaml.safe_load_all((tmp_path / "x.yaml").read_text())} == parts


def test_a_task_of_skypilot_starts_the_same_command_on_each_machine(capsys, tmp_path):
    assert cli.main([*SKY, *ODD, "track.project='two\nlines'", "--image", "hftune:1"]) == 0
    task = yaml.safe_load(capsys.readouterr().out)
    Draft7Validator(TASK).validate(task)
    assert (task["num_nodes"], task["resources"]["accelerators"], task["resources"]["image_id"]) == (
        2,
        "H100:4",
        "docker:hftune:1",
    )
    assert task["resources"]["job_recovery"] == {"recover_on_exit_codes": [STOPPED]}
    (tmp_path / "python").write_text('#!/bin/bash\nprintf "%s\\0" "$@"\n')
    (tmp_path / "python").chmod(0o755)
    variables = {
        **{"PATH": f"{tmp_path}:{os.environ['PATH']}", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"},
        **{"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "4"},
    }
    said = subprocess.run(["bash", "-c", task["run"]], env=variables, capture_output=True, text=True, check=True).stdout
    command = said.split("\0")[:-1]
    assert command[:3] == ["-m", "hftune.launchers.quietly", "torchrun"]
    options = get_args_parser().parse_args(command[3:])
    assert (options.nnodes, options.nproc_per_node, options.rdzv_endpoint) == ("2", "4", "10.0.0.1:29500")
    assert options.training_script_args == ["recipe=yelp", SKY[-1], *ODD, "track.project='two\nlines'"]


def test_what_goes_with_the_machine_is_said(capsys):
    assert cli.main([*SKY[:-1], "--cpus-per-gpu", "4"]) == 0
    said = capsys.readouterr()
    assert yaml.safe_load(said.out)["setup"] == "pip install ."
    assert said.err.startswith("hftune: output_dir=outputs/yelp is on the first machine's disk, and goes with it: ")
    assert cli.main([*K8S[:1], "recipe=recipes/yelp.yaml", *K8S[2:], "--nodes", "1", "--cpu", "--cpus-per-process", "2"]) == 0
    assert (
        capsys.readouterr().err == "hftune: recipe=recipes/yelp.yaml is read on each machine: it must be there at this path.\n"
    )
