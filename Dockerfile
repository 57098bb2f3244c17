# The workbook in a container, for a machine with an NVIDIA GPU. REMOTE.md says how to build and to start it.
# CUDA 13.0 is what pip's own torch 2.13.0 is built for on Linux, so that this way gives the same build as every other
# way. It needs driver 580 or newer on the host, and a GPU of capability 7.5 (Turing) to 12.0 (Blackwell). For an older
# GPU, or a driver from 525 on, the same image exists as 2.13.0-cuda12.6-cudnn9-runtime: change this line and no other.
FROM pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 reader \
    && install --directory --owner=reader /home/reader/dxdy /home/reader/dxdy/runs

USER 10001
WORKDIR /home/reader/dxdy
COPY --chown=reader . .

# The image's own torch shows through, and the constraint keeps pip from bringing another one.
RUN python3 -m venv --system-site-packages /home/reader/venv \
    && /home/reader/venv/bin/python -m pip install --no-cache-dir --constraint constraints.txt --editable .
ENV PATH=/home/reader/venv/bin:$PATH

# A container has a network of its own, and -p finds the lab only where the lab listens to that. Publish it on the
# loopback of the host alone, -p 127.0.0.1:8888:8888, as REMOTE.md does; the token keeps other users of the host out.
CMD ["dxdy", "lab", "--no-browser", "--ip", "0.0.0.0", "--open-to-the-network-without-a-password"]
