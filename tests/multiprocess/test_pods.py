"""The pods of a manifest of ``hftune k8s``, without a cluster: their command, variables and names, in network namespaces."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from hftune.distributed.failure_report import STOPPED
from hftune.distributed.rounds import REFUSED
from hftune.launchers.manifests import PodJob, manifest
from tests.support.machines import Machine, NotAllowed, two_machines
from tests.support.runs import Run, all_ended, started, train_on, warm_python

DIGITS = ("task.dataset=tests.support.tasks:few_digits", "train.epochs=1", "train.log_every=1", "train.batch_size=48")


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[Machine]]:
    try:
        with two_machines() as machines:
            yield machines
    except NotAllowed as error:
        pytest.skip(str(error))


def start(nodes: list[Machine], folder: Path, kind: str, *words: str, more: tuple[str, ...] = ()) -> list[subprocess.Popen]:
    """Start the pods of a job as its kubelets would; what lies on the volume is in ``folder``.

    Args:
        more: words that only the pods get, without the check when the manifest is written.
    """
    text, _ = manifest(["recipe=mnist_demo", *words], PodJob(nodes="2", cpu=True, image="hftune", kind=kind, name="digits"))
    documents = {document["kind"]: document for document in yaml.safe_load_all(text)}
    first = documents["Job" if kind == "job" else "TrainingRuntime"]["spec"]
    job = first if kind == "job" else first["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    prefix = "digits" if kind == "job" else "digits-node-0"
    hosts = folder / "hosts"  # what the cluster's name server knows
    hosts.write_text("".join(f"{node.address} {prefix}-{index}.digits\n" for index, node in enumerate(nodes)))
    assert container["command"][0] == "python"
    pods = []
    for index, node in enumerate(nodes):
        command = [warm_python(), *(word.replace("/outputs", str(folder)) for word in container["command"][1:]), *more]
        script = f'mount --bind {hosts} /etc/hosts; hostname {prefix}-{index}; exec "$@"'
        enter = ("ip", "netns", "exec", node.namespace, "unshare", "--uts", "--mount", "sh", "-c", script, "sh")
        variables = {one["name"]: one["value"] for one in container["env"]} | {"JOB_COMPLETION_INDEX": str(index)}
        if kind == "trainjob":  # what Kubeflow's runtimes for torch add
            variables |= {"PET_NNODES": "2", "PET_NODE_RANK": str(index), "PET_MASTER_ADDR": "nobody", "PET_MASTER_PORT": "1"}
        variables |= {"HF_HOME": str(folder / "cache"), "HFTUNE_JOIN_TIMEOUT_S": "60"}
        del variables["TORCH_CPP_LOG_LEVEL"]  # ``started`` sets it, too
        pods.append(started(*enter, *command, **variables))
    return pods


def test_pods_train_as_one_process_does(nodes, tmp_path):
    for code, _, err in all_ended(*start(nodes, tmp_path, "trainjob", *DIGITS)):
        assert code == 0, err
    run, alone = Run(tmp_path / "digits"), train_on(1, {"alone": DIGITS}, tmp_path, "mnist_demo")["alone"]
    assert run.result["world_size"] == 2
    for metric in ("train/loss", "train/grad_norm", "eval/loss"):
        assert run.logged(metric) == pytest.approx(alone.logged(metric), rel=1e-5)


def test_pods_of_a_wrong_recipe_end_with_the_code_that_is_not_tried_again(nodes, tmp_path):
    for code, _, err in all_ended(*start(nodes, tmp_path, "job", *DIGITS, more=("train.lrr=1",))):
        assert code == REFUSED, err
        assert "Traceback" not in err


def test_an_evicted_pod_lets_the_other_end_with_the_code_that_is_not_counted(nodes, tmp_path):
    pods = start(nodes, tmp_path, "job", *DIGITS, "train.epochs=1000")
    until = time.monotonic() + 120
    while not (tmp_path / "digits" / "metrics.jsonl").exists():
        assert time.monotonic() < until and pods[1].poll() is None
        time.sleep(0.1)
    pods[1].send_signal(signal.SIGTERM)
    (stays, _, err), (evicted, _, _) = all_ended(*pods)
    assert (stays, evicted) == (STOPPED, 128 + signal.SIGTERM), err
    assert [*(tmp_path / "digits" / "checkpoints").glob("step_*")]
