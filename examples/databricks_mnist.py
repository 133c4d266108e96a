# Databricks notebook source
# %% [markdown]
# # MNIST: the same training on one process, on several, and on the executors of a cluster
#
# A convolutional network learns handwritten digits, logged to MLflow. What is trained is a recipe; where it is trained is one
# line, and does not change the result. Runs from top to bottom on Databricks and on a laptop with Java:
#
#     pip install "hftune[spark,mlflow]"
#     python examples/databricks_mnist.py
#
# RECIPE=mnist_demo draws its own digits instead of downloading MNIST; OUTPUT has to be a folder that the driver and all
# executors see, and in which files can be appended to and locked. Databricks' /Volumes and /dbfs are object storage and may
# refuse that (which is said before training): mount a network file system there, or train on the driver alone and copy OUTPUT.

# %%
import os
from pathlib import Path

from hftune import Recipe, load_model, spark, train

RECIPE = os.environ.get("RECIPE", "mnist_best")
OUTPUT = Path(os.environ.get("OUTPUT", "outputs/databricks_mnist")).resolve()


def recipe(name: str) -> Recipe:
    """The same training, in an output folder of its own."""
    words = os.environ.get("WORDS", "").split()
    return Recipe.load(RECIPE, "track.with=[mlflow]", f"track.run_name={name}", f"output_dir={OUTPUT / name}", *words)


# %% [markdown]
# ## 1. On the driver, as one process

# %%
results = {"one process": train(recipe("one_process"))}

# %% [markdown]
# ## 2. On the driver, as two processes
#
# `local_mode=True`: TorchDistributor starts them here. With GPUs, say `use_gpu=True` and their number.

# %%
results["two processes"] = spark.launch(recipe("two_processes"), num_processes=2, local_mode=True)

# %% [markdown]
# ## 3. On the executors of the cluster
#
# `local_mode=False`: each process is a Spark task. Databricks has a session already; elsewhere one is made here.

# %%
results["executors"] = spark.launch(recipe("executors"), num_processes=2, local_mode=False)

# %% [markdown]
# ## 4. The results are the same
#
# The same samples in the same steps, the same dropout, the same learning rates; only sums are added up in another order.

# %%
for name, result in results.items():
    metrics = result.metrics
    print(f"{name:<14} {result.world_size} processes  loss {metrics['loss']:.6f}  accuracy {metrics['accuracy']:.4f}")
    assert abs(metrics["loss"] / results["one process"].metrics["loss"] - 1) < 1e-3

# %% [markdown]
# ## 5. Load the model and test it
#
# From the output folder; or from MLflow, where it answers as class labels without a line of ours.

# %%
import mlflow
import numpy as np

from hftune.tracking.mlflow_tracker import tracking_uri

task = recipe("executors").task
digits = [example["image"][:, :, 0] for example in (task.datasets()["eval"][place] for place in range(5))]
print(load_model(results["executors"].output_dir).predict(digits))

# %%
client = mlflow.MlflowClient(tracking_uri())
experiment = client.get_experiment_by_name(recipe("executors").track.project)
logged = client.search_runs([experiment.experiment_id], "attributes.run_name = 'executors'", max_results=1)[0]
mlflow.set_tracking_uri(tracking_uri())
print(mlflow.pyfunc.load_model(f"runs:/{logged.info.run_id}/model").predict(np.stack(digits)))
