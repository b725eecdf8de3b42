# syntax=docker/dockerfile:1
# Images for clusters of your own (the test cluster needs none):
#   docker build --target operator --tag registry.example/pacekeeper/operator:0.1.0 .
#   docker build --target trainer  --tag registry.example/pacekeeper/trainer:0.1.0 .
# Build a training image FROM the trainer, or `pip install pacekeeper[trainer]` into one of your own: any image with Python
# 3.11 to 3.13 and PyTorch 2.9 to 2.15 will do, and keeps its PyTorch.
ARG PYTHON=3.11

FROM python:${PYTHON}-slim AS source
WORKDIR /opt/pacekeeper
# The compiler is for the package's native parts; without it the wheel is a pure one.
RUN apt-get update -q && apt-get install -y -q --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY analysis analysis
COPY operator operator
COPY trainer trainer
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim AS base
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
RUN python -m venv /opt/venv \
    && groupadd --gid 65532 pacekeeper \
    && useradd --uid 65532 --gid 65532 --no-create-home --home-dir /tmp pacekeeper
WORKDIR /opt/pacekeeper

# Operator, and the probe pods that it sends to quarantined nodes.
FROM base AS operator
RUN --mount=from=source,source=/wheels,target=/wheels \
    pip install --no-cache-dir "$(ls /wheels/pacekeeper-*.whl)[operator]"
USER 65532:65532
CMD ["python", "-m", "pacekeeper_operator"]

# Library, launcher and sidecar with PyTorch.
FROM base AS trainer
RUN --mount=from=source,source=/wheels,target=/wheels \
    pip install --no-cache-dir "$(ls /wheels/pacekeeper-*.whl)[trainer]"
COPY examples examples
USER 65532:65532
CMD ["pacekeeper", "--help"]
