# An image with Lockstep and torch for CPUs; for GPUs of NVIDIA:
#   docker build --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu126 .
# To add a program of your own: FROM this image, COPY train.py ./ (docs/kubernetes.md).
FROM python:3.11-slim AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN python -m venv /opt/lockstep
WORKDIR /source
COPY constraints.txt ./
# torch is most of the image; its layer stays the same while the sources change.
RUN /opt/lockstep/bin/pip install --no-cache-dir -c constraints.txt --index-url "$TORCH_INDEX" torch
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY src ./src
RUN /opt/lockstep/bin/pip install --no-cache-dir -c constraints.txt '.[data]'

FROM python:3.11-slim
COPY --from=build /opt/lockstep /opt/lockstep
ENV PATH=/opt/lockstep/bin:$PATH PYTHONUNBUFFERED=1
RUN useradd --uid 1000 --create-home lockstep
USER 1000:1000
WORKDIR /home/lockstep
CMD ["lockstep", "--help"]
