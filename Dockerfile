# Nightjar in one image for every role: `docker run nightjar worker`, `docker run nightjar submit ...`.
# EXTRAS="s3,postgres,gpu" makes the image for GPU workers.
FROM python:3.12-slim AS build
ARG EXTRAS="s3,postgres"
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/nightjar
WORKDIR /src
COPY pyproject.toml requirements.lock README.md ./
COPY jobs jobs
COPY worker worker
COPY pipelines pipelines
COPY kernels kernels
COPY migrations migrations
RUN /opt/nightjar/bin/pip install --constraint requirements.lock ".[${EXTRAS}]"

FROM python:3.12-slim
RUN useradd --uid 10001 --create-home nightjar && install -d -o nightjar /data
COPY --from=build /opt/nightjar /opt/nightjar
ENV PATH=/opt/nightjar/bin:$PATH PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
USER nightjar
WORKDIR /data
# SIGTERM drains a worker; give it `worker.drain_seconds` before SIGKILL.
STOPSIGNAL SIGTERM
ENTRYPOINT ["jobs"]
CMD ["--help"]
