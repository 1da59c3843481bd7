# Images of this harness, one for each list of pins in engines/environments. `harness images build NAME` builds them, and
# labels them with the code that they hold, without which no launch takes one.
# BASE_IMAGE is any Debian-like image whose Python is 3.11 or later (it is installed where there is none); for CUDA targets
# one with the toolkit, where kernels are to be compiled. Wheels in the folder .wheels are found before those of an index:
# a CPU build of torch, for example. A tag moves: for an image that can be built again as it was, give BASE_IMAGE with the
# digest that `docker image inspect` tells (python:3.11-slim@sha256:...).
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
# torch first, with what it requires (of CUDA's libraries nothing for a build for CPUs, all of them for one of CUDA); last,
# what an environment builds itself: llama.cpp, for the CPU of the machine that builds the image
RUN printf '%s\n' '#!/bin/sh -e' \
      'first=$(grep -E "^(torch|setuptools|wheel)==" /pins/$1.txt || true)' \
      'pip="/opt/engine/bin/pip install --no-cache-dir --disable-pip-version-check --quiet --find-links /pins"' \
      'if [ -n "$first" ]; then $pip -c /pins/$1.txt $first; fi' \
      '$pip --no-deps --no-build-isolation -r /pins/$1.txt' \
      'if [ -f /pins/$1.py ]; then /opt/engine/bin/python -I /pins/$1.py; fi' > /usr/local/bin/install-pins \
    && chmod +x /usr/local/bin/install-pins

# ------------------------------------------------------------------ this project's code, the same for all
FROM base AS code
COPY harness /code/harness
COPY engines /code/engines
COPY suites /code/suites
COPY reports /code/reports
# a checkout made with another umask than 022 has files that user 1000 could not read
RUN chmod -R a+rX /code

FROM base AS engine
# HOME: where Triton keeps what it has compiled
ENV PYTHONPATH=/code HOME=/tmp
ENTRYPOINT ["python3", "-P", "-m", "harness"]
CMD ["--help"]
WORKDIR /results
USER 1000:1000

# ------------------------------------------------------------------ the worker's image of any environment
FROM installer AS packages
ARG ENVIRONMENT=offload
COPY engines/environments/${ENVIRONMENT}.* .wheels* /pins/
RUN install-pins ${ENVIRONMENT}
FROM engine AS worker
COPY --from=packages /opt/engine /opt/engine
COPY --from=code /code /code
ARG ENVIRONMENT=offload
ARG CODE=unknown
LABEL offload-harness.environment=${ENVIRONMENT} offload-harness.code=$CODE

# `harness serve` on all of the container's addresses: publish its port where you want it reached
FROM worker AS serve
EXPOSE 8000
ENTRYPOINT ["python3", "-P", "-m", "harness", "serve", "--host", "0.0.0.0"]

# HELM asks its questions and judges the answers in an interpreter of its own (HARNESS_HELM_PYTHON): no worker is in it
FROM base AS helm
COPY --from=packages /opt/engine /opt/engine
ARG CODE=unknown
LABEL offload-harness.environment=helm offload-harness.code=$CODE
USER 1000:1000
CMD ["helm-run", "--help"]
