# Two images: `docker build --target operator .` and `docker build --target trainer .` (buildah can
# build them too, with a BASE_IMAGE).
# All packages are installed from the lock files in locks/, which contain the hash of each file;
# `make locks` renews them. BASE_IMAGE: a Debian-like image with python3 >= 3.11 and its venv
# module. TORCH_INDEX_URL: a different index for torch, for example with wheels for another
# accelerator, or with CPU-only wheels (a tenth of the size). From such an index, the locked
# versions of torch and torchvision and their dependencies are installed without hashes.
ARG BASE_IMAGE=base

# --- base: a separate stage, because Dependabot updates only images that a FROM names. A release
# needs the digest (scripts/release_notes.py).
FROM python:3.12-slim AS base

# --- code: this repository's packages as a wheel.
FROM ${BASE_IMAGE} AS code
COPY locks/build.txt /locks/
RUN python3 -m venv /opt/build \
 && /opt/build/bin/pip install --no-cache-dir --no-deps --only-binary=:all: --require-hashes -r /locks/build.txt
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY charts/ddpjob-operator/crds charts/ddpjob-operator/crds
COPY operator operator
COPY runtime runtime
COPY trainer trainer
RUN /opt/build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /wheels .

# --- operator-build: a virtual environment without pip. The root filesystem will be read-only, so the bytecode of the
# operator's imports is compiled here. The client's synchronous API classes (24 MB) are removed,
# because the operator uses only asyncio; its models stay.
FROM ${BASE_IMAGE} AS operator-build
COPY locks/operator.txt /locks/
RUN python3 -m venv --without-pip /opt/venv && python3 -m venv /opt/build \
 && /opt/build/bin/pip --python /opt/venv/bin/python install --no-cache-dir --no-compile --no-deps --only-binary=:all: \
    --require-hashes -r /locks/operator.txt
COPY --from=code /wheels /wheels
RUN /opt/build/bin/pip --python /opt/venv/bin/python install --no-cache-dir --no-compile --no-deps --no-index /wheels/*.whl \
 && rm -r /opt/venv/lib/python3*/site-packages/kubernetes/client/api \
 && /opt/venv/bin/python -c "import ddpjob.controller.main, ddpjob.dashboard.__main__"

FROM ${BASE_IMAGE} AS operator
LABEL org.opencontainers.image.title="DDPJob operator" org.opencontainers.image.licenses="Apache-2.0"
COPY --from=operator-build /opt/venv /opt/venv
# USER: kopf needs a user name, and a numeric user has none.
ENV PATH=/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp USER=ddpjob
USER 10001:10001
WORKDIR /tmp
EXPOSE 8080 9090
ENTRYPOINT ["python3", "-m", "ddpjob.controller"]

# --- trainer: torch, and the compiler and headers with which torch.compile builds its kernels. The user cannot write
# bytecode, so it is compiled here, on all cores, except for the packages' own tests. NVIDIA's
# static profiler libraries in triton (170 MB) are removed, because they are needed only to link
# another profiler.
FROM ${BASE_IMAGE} AS trainer
LABEL org.opencontainers.image.title="DDPJob trainer" org.opencontainers.image.licenses="Apache-2.0"
RUN apt-get update \
 && headers=$(python3 -c "import os, sysconfig; print('' if os.path.exists(sysconfig.get_path('include') + '/Python.h') else 'libpython3-dev')") \
 && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends gcc g++ libc6-dev ${headers} \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/archives/*.deb
ARG TORCH_INDEX_URL=
# Otherwise pip's downloads, which are gigabytes, would stay in the image. Leave it empty
# if pip's cache folder is a mount.
ARG PIP_NO_CACHE_DIR=1
COPY locks/torch.txt /locks/
RUN python3 -m venv /opt/venv \
 && if [ -z "${TORCH_INDEX_URL}" ]; then \
      /opt/venv/bin/pip install --no-compile --no-deps --only-binary=:all: --require-hashes -r /locks/torch.txt; \
    else \
      /opt/venv/bin/pip install --no-compile --only-binary=:all: --index-url "${TORCH_INDEX_URL}" \
        $(grep -oE '^torch(vision)?==[0-9.]+' /locks/torch.txt); \
    fi \
 && rm -f /opt/venv/lib/python3*/site-packages/triton/backends/nvidia/lib/cupti*/*.a \
 && /opt/venv/bin/python -m compileall -q -j 0 -x '/tests?/' /opt/venv/lib
COPY locks/trainer.txt /locks/
RUN /opt/venv/bin/pip install --no-compile --no-deps --only-binary=:all: --require-hashes -r /locks/trainer.txt \
 && /opt/venv/bin/python -m compileall -q -j 0 -x '/tests?/' /opt/venv/lib
# torch.compile names its cache folder after the user, so it needs a name. Group 0 may write, for platforms that choose
# the user ID.
RUN useradd --uid 10001 --gid 0 --no-log-init --home-dir /home/trainer trainer \
 && install --directory --owner=10001 --group=0 --mode=0775 /home/trainer /workspace
COPY --from=code /wheels /wheels
RUN /opt/venv/bin/pip install --no-deps --no-index /wheels/*.whl
ENV PATH=/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    PYTHONUNBUFFERED=1 HOME=/home/trainer USER=trainer DDPJOB_PRELOAD=ddpjob_trainer.preload
USER 10001:0
WORKDIR /workspace
COPY examples/*.py examples/
