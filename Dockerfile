# syntax=docker/dockerfile:1
# Images for clusters of your own (the test cluster needs none), for whatever platform they are built on or by `--platform`:
#   docker build --target operator --tag registry.example/pacekeeper/operator:0.1.0 .
#   docker build --target trainer  --tag registry.example/pacekeeper/trainer:0.1.0 .
#   docker build --target watch    --tag registry.example/pacekeeper/watch:0.1.0 .
#   docker build --target sbom --output build .       build/sbom.json: what is in the operator's environment (CycloneDX)
# Build a training image FROM the trainer, or `pip install pacekeeper[trainer]` into one of your own: any image with Python
# 3.11 to 3.14 and PyTorch 2.9 to 2.15 will do, and keeps its PyTorch.
#
# Any image with Python 3.11 to 3.14, venv, and useradd; for the trainer's native parts a Debian or Ubuntu, too. Name it by its
# digest where builds are to be repeatable.
ARG BASE=python:3.11-slim

FROM ${BASE} AS base
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PIP_NO_CACHE_DIR=1 HOME=/tmp
RUN python3 -m venv /opt/venv \
    && groupadd --gid 65532 pacekeeper \
    && useradd --uid 65532 --gid 65532 --no-create-home --home-dir /tmp pacekeeper
WORKDIR /opt/pacekeeper

FROM base AS source
COPY locks/build.txt locks/
RUN pip install --require-hashes --requirement locks/build.txt
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY analysis analysis
COPY operator operator
COPY trainer trainer

# The operator uses none of the native parts.
FROM source AS pure-wheel
RUN PACEKEEPER_PURE=1 pip wheel --no-deps --no-build-isolation --wheel-dir /wheels .

FROM source AS wheel
RUN apt-get update -q && apt-get install -y -q --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /wheels .

# Operator, and the probe pods that it sends to nodes. `make lock` renews the versions and hashes.
# Nothing is mounted: buildah and Podman take a layer from their cache though what it mounted has changed.
FROM base AS operator
COPY locks/operator.txt locks/
RUN pip install --require-hashes --requirement locks/operator.txt
COPY --from=pure-wheel /wheels wheels
RUN pip install --no-deps wheels/pacekeeper-*.whl && pip check
LABEL org.opencontainers.image.title="Pacekeeper's operator" org.opencontainers.image.licenses=Apache-2.0
USER 65532:65532
CMD ["python", "-m", "pacekeeper_operator"]

FROM base AS tools
COPY locks/sbom.txt locks/
RUN python -m venv /tools && /tools/bin/pip install --require-hashes --requirement locks/sbom.txt

FROM operator AS bill
USER 0:0
COPY --from=tools /tools /tools
RUN /tools/bin/cyclonedx-py environment --output-reproducible --output-file /sbom.json /opt/venv

FROM scratch AS sbom
COPY --from=bill /sbom.json /

FROM base AS watch-environment
COPY locks/watch.txt locks/
RUN pip install --require-hashes --requirement locks/watch.txt
COPY --from=wheel /wheels wheels
RUN pip install --no-deps wheels/pacekeeper-*.whl && pip check
# The build fails if a native part is missing that a watched pod needs.
RUN python -m pacekeeper.watch.payload --launcher /tmp/payload && /tmp/payload/runtime/bin/pacekeeper --help && rm -r /tmp/payload
RUN pip uninstall --yes setuptools pip && find /opt/venv -type d -name tests -prune -exec rm -r {} +

# Sidecar and payload, without PyTorch, for workers and for pods of other controllers. Every node pulls it.
FROM ${BASE} AS watch
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
COPY --from=watch-environment /opt/venv /opt/venv
LABEL org.opencontainers.image.title="Pacekeeper's watch" org.opencontainers.image.licenses=Apache-2.0
USER 65532:65532
CMD ["python", "-m", "pacekeeper.sidecar"]

# Library, launcher and sidecar with PyTorch, of which the newest that is allowed is taken: it is yours to choose.
FROM base AS trainer
COPY --from=wheel /wheels wheels
RUN pip install "$(ls wheels/pacekeeper-*.whl)[trainer]"
LABEL org.opencontainers.image.title="Pacekeeper's trainer" org.opencontainers.image.licenses=Apache-2.0
COPY examples examples
USER 65532:65532
CMD ["pacekeeper", "--help"]
