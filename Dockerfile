# Nightjar in one image for every role: `docker run nightjar worker`, `docker run nightjar submit ...`.
#
# The image for GPU workers is built on CUDA's development image: nvcc compiles the CUDA kernels into it, and where it runs gcc and
# Python's headers make Triton's. On a base without them a worker starts, warns and is slower; `nightjar doctor` says the same.
#   docker build --build-arg BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04 --build-arg EXTRAS=s3,postgres,gpu,serve -t nightjar:gpu .
ARG BASE=python:3.12-slim

FROM ${BASE} AS base
RUN command -v python3 >/dev/null || { apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends python3 python3-venv python3-dev gcc \
    && rm -rf /var/lib/apt/lists/*; }

FROM base AS build
ARG EXTRAS="s3,postgres,export"
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m venv /opt/nightjar
WORKDIR /src
COPY pyproject.toml setup.py requirements.lock README.md LICENSE ./
COPY nightjar nightjar
COPY jobs jobs
COPY worker worker
COPY pipelines pipelines
COPY kernels kernels
COPY migrations migrations
RUN /opt/nightjar/bin/pip install --constraint requirements.lock ".[${EXTRAS}]"

FROM base
RUN useradd --uid 10001 --create-home nightjar && install -d -o nightjar /data /cache /voices
COPY --from=build /opt/nightjar /opt/nightjar
ENV PATH=/opt/nightjar/bin:$PATH PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
# What is compiled or downloaded where the image runs: a volume keeps it.
ENV XDG_CACHE_HOME=/cache TRITON_CACHE_DIR=/cache/triton
USER nightjar
WORKDIR /data
# SIGTERM drains a worker; give it `worker.drain_seconds` before SIGKILL.
STOPSIGNAL SIGTERM
ENTRYPOINT ["nightjar"]
CMD ["--help"]
