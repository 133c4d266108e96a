# An image to train in, on GPUs or CPUs. From a checkout:
#   docker build --tag hftune .
#   docker run --rm hftune hftune doctor
#   docker run --rm --gpus all --ipc=host --volume "$PWD/outputs:/home/hftune/outputs" hftune hftune train recipe=yelp
# For CPUs only, let pip find PyTorch's CPU wheels: --build-arg PIP_EXTRA_INDEX_URL=...
FROM python:3.11-slim-bookworm

# An argument, and so gone from the image once it is built.
ARG PIP_EXTRA_INDEX_URL=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1

WORKDIR /opt/hftune
# PyTorch in a layer of its own: gigabytes that change rarely.
COPY constraints.txt ./
RUN python -m pip install --constraint constraints.txt torch
COPY pyproject.toml README.md LICENSE ./
COPY hftune ./hftune
COPY recipes ./recipes
COPY accelerate_configs ./accelerate_configs
RUN python -m pip install --constraint constraints.txt ".[mlflow,tensorboard]"

# Training needs no root. A mounted outputs folder has to be writable for this user; or give --user "$(id -u):$(id -g)".
RUN useradd --create-home --uid 1000 hftune && install --directory --owner hftune /home/hftune/outputs
USER 1000
WORKDIR /home/hftune

# No ENTRYPOINT: hftune, torchrun and accelerate are on the PATH. Without a shell in between, they receive SIGTERM themselves.
CMD ["hftune", "recipes"]
