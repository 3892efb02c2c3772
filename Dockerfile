# Image for training on NVIDIA GPUs. Checkpoints and outputs are mounted from the host:
#
#   mkdir -p ckpts outputs
#   docker build --build-arg UID=$(id -u) -t sage-grpo .
#   docker run --rm -it --gpus all --ipc=host --ulimit memlock=-1 \
#       -v "$PWD/ckpts:/workspace/ckpts" -v "$PWD/outputs:/workspace/outputs" \
#       sage-grpo bash run_post_train.sh --config configs/hunyuanvideo15_480p_8gpu.yaml
#
# memlock: offloaded weights, checkpoints and NCCL use pinned memory.
# Without GPUs, leave out --gpus all. `bash run_post_train.sh` without flags trains the miniature.
ARG CUDA=13.0.2
FROM nvidia/cuda:${CUDA}-base-ubuntu24.04
# torch ships its own CUDA libraries. Triton needs gcc and Python's headers; config.yaml records the git commit; on
# several nodes, scripts/post_train/train_grpo.sh finds their addresses with ip.
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates curl g++ gcc git iproute2 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

ARG UID=1000
RUN useradd --create-home --non-unique --uid "$UID" trainer && install --directory --owner=trainer /workspace
USER trainer
WORKDIR /workspace

# Installed before the sources are copied, so that this layer is rebuilt only when the requirements change.
COPY --chown=trainer requirements.txt requirements-dev.txt ./
COPY --chown=trainer scripts/setup.sh scripts/
# The tools for tests are for the GPU check.
RUN bash -c 'source scripts/setup.sh && install_packages requirements-dev.txt'
ENV PATH=/workspace/.venv/bin:$PATH

COPY --chown=trainer . .
RUN mkdir -p ckpts outputs
CMD ["bash"]
