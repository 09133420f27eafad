# A stand-in for the image that vLLM publishes for CPUs, where no registry of images can be reached: the same package at the
# same version, with NIXL, from the environment of bench/peers/install_vllm.sh, which is the context.
ARG BASE_IMAGE

FROM ${BASE_IMAGE}
COPY . /opt/vllm
# The environment is made to run where it was installed.  Compiled here: a pod may not write bytecode.
RUN ln -sfn "$(command -v python3)" /opt/vllm/bin/python && \
    sed -i '1s,^#!.*,#!/opt/vllm/bin/python,' /opt/vllm/bin/vllm && \
    sed -i "s,^home = .*,home = $(dirname "$(command -v python3)")," /opt/vllm/pyvenv.cfg && \
    { /opt/vllm/bin/python -m compileall -q -j 0 --invalidation-mode unchecked-hash -x '/(tests?|testing)/' /opt/vllm/lib || true; }
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends libnuma1 && rm -rf /var/lib/apt/lists/*
ENV PATH=/opt/vllm/bin:/usr/local/bin:/usr/bin:/bin
LABEL org.opencontainers.image.title="stand-in for vllm/vllm-openai-cpu:v0.32.0"
