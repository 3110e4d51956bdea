# MPI, the package and its tests in one image; ranks of a node share memory in /dev/shm, which is small by default:
#
#     docker build -t spmd_engine .
#     docker run --rm --shm-size=1g spmd_engine                # make train
#     docker run --rm --shm-size=1g spmd_engine make test
FROM python:3.13-slim
RUN apt-get update && apt-get install -y --no-install-recommends git make && rm -rf /var/lib/apt/lists/*
WORKDIR /spmd_engine
COPY . .
RUN make .venv/installed-mpich .venv/installed-mpich-test
CMD ["make", "train"]
