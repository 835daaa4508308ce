# bytetx serve as an image. For a machine without a GPU, and for one with NVIDIA GPUs:
#
#     docker build --target cpu -t bytetx:cpu .
#     docker build --target cuda -t bytetx:cuda .
#     docker run --rm -p 127.0.0.1:8080:8080 -v bytetx-cache:/cache bytetx:cpu --model BAAI/bge-small-en-v1.5
#     docker run --rm --gpus all -p 127.0.0.1:8080:8080 -v bytetx-cache:/cache bytetx:cuda --model ...
#
# PORT changes the port, for the health check as well; TEI's other variables are read, too.
# The server runs as user 10001, and writes nothing but /cache: a volume, or with --read-only a
# tmpfs, owned by that user.

FROM python:3.12-slim-trixie AS build-cpu
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY . .
RUN BYTETX_CUDA=0 pip wheel --no-deps --wheel-dir /wheels .

FROM nvidia/cuda:13.0.1-devel-ubuntu24.04 AS build-cuda
RUN apt-get update && apt-get install --yes --no-install-recommends g++ python3-dev python3-pip python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY . .
RUN BYTETX_CUDA=1 python3 -m pip wheel --no-deps --wheel-dir /wheels .

FROM python:3.12-slim-trixie AS base
ENV HF_HOME=/cache/huggingface TRITON_CACHE_DIR=/cache/triton PYTHONDONTWRITEBYTECODE=1 \
    BYTETX_HOSTNAME=0.0.0.0 PORT=8080
RUN useradd --uid 10001 --no-create-home --home-dir /cache bytetx && install -d -o bytetx /cache
WORKDIR /cache
EXPOSE 8080
HEALTHCHECK --interval=10s --timeout=3s --start-period=10m \
    CMD python -c "import urllib.request; urllib.request.urlopen('http://127.0.0.1:$PORT/health', timeout=2)"
ENTRYPOINT ["bytetx", "serve"]

FROM base AS cuda
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
# Triton compiles its launchers where no native kernel is.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir "torch>=2.11"
RUN --mount=from=build-cuda,source=/wheels,target=/wheels \
    pip install --no-cache-dir "$(ls /wheels/bytetx-*.whl)[serve,otlp]"
USER 10001

FROM base AS cpu
RUN pip install --no-cache-dir "torch>=2.11" --index-url https://download.pytorch.org/whl/cpu
RUN --mount=from=build-cpu,source=/wheels,target=/wheels \
    pip install --no-cache-dir "$(ls /wheels/bytetx-*.whl)[serve,otlp]"
USER 10001
