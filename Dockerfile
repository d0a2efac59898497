# The workflow and the library with the versions of envs/constraints.txt. docs/guide/install.md has the commands.
FROM python:3.11-slim-bookworm

# Triton compiles with gcc on a GPU; pip needs git for flame.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc git libc6-dev \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /statecut
COPY . .

# An index with other builds of torch (for CPUs, for older drivers); pip prefers its wheels.
ARG PIP_EXTRA_INDEX_URL
RUN pip install --no-cache-dir -c envs/constraints.txt -e '.[recovery]' -e src/reproduction

# For pretraining as in the paper: --build-arg FLAME=1
ARG FLAME
RUN if [ -n "$FLAME" ]; then pip install --no-cache-dir --no-deps --no-build-isolation -r envs/flame.txt; fi

# Any user can run it: caches go where everybody may write, and Snakemake wants a name.
ENV HOME=/tmp USER=statecut
CMD ["snakemake", "--profile", "profiles/demo"]
