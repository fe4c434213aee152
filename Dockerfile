# colo-grpo with PyTorch 2.11, for CPUs and NVIDIA GPUs. From the repository's root:
#   docker build -t colo-grpo .
#   docker run --gpus all --shm-size 16g --rm -v "$PWD:/work" colo-grpo --nproc 8 --config run.toml
FROM rust:1.88-bookworm AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ python3-pip && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY . .
RUN scripts/setup.sh && scripts/package.sh /package wheel

FROM python:3.12-slim-bookworm
RUN --mount=from=build,source=/package,target=/package pip install --no-cache-dir /package/*.whl
# The name by which the program asks for PyTorch's NCCL, made here as a user may not write there.
RUN site=$(python -c 'import importlib.util as u; print(u.find_spec("torch").submodule_search_locations[0])') \
    && ln -s "$(realpath "$site/../nvidia/nccl/lib/libnccl.so.2")" "$site/lib/libnccl.so"
WORKDIR /work
ENTRYPOINT ["colo-grpo"]
