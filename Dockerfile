# Images of this harness, one target for each environment that engines have (harness images build NAME):
#   docker build --target offload -t offload-harness/offload .
# BASE_IMAGE is any Debian-like image whose Python is 3.11 or later (it is installed where there is none); for CUDA targets
# one with the toolkit, where kernels are to be compiled. Wheels in the folder .wheels are found before those of an index:
# a CPU build of torch, for example.
ARG BASE_IMAGE=python:3.11-slim

# ------------------------------------------------------------------ what all have: a compiler, for kernels that are
# built for the CPU they run on, and libaio, for DeepSpeed
FROM ${BASE_IMAGE} AS base
RUN if command -v apt-get >/dev/null; then \
      python3 -c 'import venv, ensurepip' 2>/dev/null || python="python3 python3-venv python3-dev"; \
      apt-get update -qq && apt-get install -y -qq --no-install-recommends g++ libaio-dev $python && \
      rm -rf /var/lib/apt/lists/*; \
    else echo "the base image has no apt-get: it has to bring a C++ compiler and libaio itself"; fi
RUN mkdir -p /cache /results && chmod 1777 /cache /results
ENV PATH=/opt/engine/bin:$PATH PYTHONUNBUFFERED=1 HARNESS_CACHE=/cache

# ------------------------------------------------------------------ where packages are installed: pip's settings are
# arguments of the build; no image holds them, but the builder's intermediate stages do (docker image prune removes those)
FROM base AS installer
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_CERT
ARG PIP_DEFAULT_TIMEOUT
# arguments end with their stage, and the stages below install; what is empty pip takes for not given
ENV PIP_INDEX_URL=$PIP_INDEX_URL PIP_EXTRA_INDEX_URL=$PIP_EXTRA_INDEX_URL PIP_CERT=$PIP_CERT \
    PIP_DEFAULT_TIMEOUT=$PIP_DEFAULT_TIMEOUT
RUN python3 -m venv /opt/engine
# torch first, with what it requires: of CUDA's libraries nothing for a build for CPUs, all of them for one of CUDA
RUN printf '%s\n' '#!/bin/sh -e' \
      'first=$(grep -E "^(torch|setuptools|wheel)==" /pins/$1.txt || true)' \
      'pip="/opt/engine/bin/pip install --no-cache-dir --disable-pip-version-check --quiet --find-links /pins"' \
      'if [ -n "$first" ]; then $pip -c /pins/$1.txt $first; fi' \
      '$pip --no-deps --no-build-isolation -r /pins/$1.txt' > /usr/local/bin/install-pins \
    && chmod +x /usr/local/bin/install-pins

# ------------------------------------------------------------------ this project's code, the same for all
FROM base AS code
COPY harness /code/harness
COPY engines /code/engines
COPY suites /code/suites
COPY reports /code/reports

FROM base AS engine
# HOME: where Triton keeps what it has compiled
ENV PYTHONPATH=/code HOME=/tmp
ENTRYPOINT ["python3", "-P", "-m", "harness"]
CMD ["--help"]
WORKDIR /results
USER 1000:1000

# ------------------------------------------------------------------ the targets, offload first: a builder without
# BuildKit builds whatever stands above the one that is asked for (harness images build leaves that out)
FROM installer AS offload-packages
COPY engines/environments/offload.txt .wheels* /pins/
RUN install-pins offload
FROM engine AS offload
COPY --from=offload-packages /opt/engine /opt/engine
COPY --from=code /code /code
ARG CODE=unknown
LABEL offload-harness.environment=offload offload-harness.code=$CODE

FROM installer AS harness-packages
COPY engines/environments/harness.txt .wheels* /pins/
RUN install-pins harness
FROM engine AS harness
COPY --from=harness-packages /opt/engine /opt/engine
COPY --from=code /code /code
ARG CODE=unknown
LABEL offload-harness.environment=harness offload-harness.code=$CODE

FROM installer AS accelerate-packages
COPY engines/environments/accelerate.txt .wheels* /pins/
RUN install-pins accelerate
FROM engine AS accelerate
COPY --from=accelerate-packages /opt/engine /opt/engine
COPY --from=code /code /code
ARG CODE=unknown
LABEL offload-harness.environment=accelerate offload-harness.code=$CODE

FROM installer AS deepspeed-packages
COPY engines/environments/deepspeed.txt .wheels* /pins/
RUN install-pins deepspeed
FROM engine AS deepspeed
COPY --from=deepspeed-packages /opt/engine /opt/engine
COPY --from=code /code /code
ARG CODE=unknown
LABEL offload-harness.environment=deepspeed offload-harness.code=$CODE

FROM installer AS flexgen-packages
COPY engines/environments/flexgen.txt .wheels* /pins/
RUN install-pins flexgen
FROM engine AS flexgen
COPY --from=flexgen-packages /opt/engine /opt/engine
COPY --from=code /code /code
ARG CODE=unknown
LABEL offload-harness.environment=flexgen offload-harness.code=$CODE

FROM installer AS llamacpp-packages
COPY engines/environments/llamacpp.txt .wheels* /pins/
RUN install-pins llamacpp
FROM engine AS llamacpp
COPY --from=llamacpp-packages /opt/engine /opt/engine
COPY --from=code /code /code
ARG CODE=unknown
LABEL offload-harness.environment=llamacpp offload-harness.code=$CODE

FROM installer AS airllm-packages
COPY engines/environments/airllm.txt .wheels* /pins/
RUN install-pins airllm
FROM engine AS airllm
COPY --from=airllm-packages /opt/engine /opt/engine
COPY --from=code /code /code
ARG CODE=unknown
LABEL offload-harness.environment=airllm offload-harness.code=$CODE

FROM installer AS vllm-packages
COPY engines/environments/vllm.txt .wheels* /pins/
RUN install-pins vllm
FROM engine AS vllm
COPY --from=vllm-packages /opt/engine /opt/engine
COPY --from=code /code /code
ARG CODE=unknown
LABEL offload-harness.environment=vllm offload-harness.code=$CODE

# HELM asks its questions and judges the answers in an interpreter of its own (HARNESS_HELM_PYTHON): no worker is in it
FROM installer AS helm-packages
COPY engines/environments/helm.txt .wheels* /pins/
RUN install-pins helm
FROM base AS helm
COPY --from=helm-packages /opt/engine /opt/engine
ARG CODE=unknown
LABEL offload-harness.environment=helm offload-harness.code=$CODE
USER 1000:1000
CMD ["helm-run", "--help"]
