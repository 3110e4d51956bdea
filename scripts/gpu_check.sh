#!/bin/sh
# The first minutes on a machine with a GPU: tests, verify, speed, memory. Options: see scripts/gpu_check.py --help.
cd "$(dirname "$0")/.." || exit
[ -x .venv/bin/python ] && : "${PYTHON:=.venv/bin/python}"
exec "${PYTHON:-python3}" scripts/gpu_check.py "$@"
