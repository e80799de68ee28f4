"""Runs a program in two JAX processes of two CPU devices each."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from tests.compiler_flags import xla_flags

ROOT = Path(__file__).resolve().parents[3]


def run_in_two_processes(code: str) -> list[tuple[str, str]]:
    """Run `code` with the coordinator's address and the number of the process as arguments; return the outputs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for number in range(2):
        env = os.environ | {
            "PYTHONPATH": str(ROOT), "XLA_FLAGS": xla_flags(devices=2), "JAX_PLATFORMS": "cpu",
        }  # fmt: skip
        command = [sys.executable, "-c", code, f"127.0.0.1:{port}", str(number)]
        processes.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    return outputs
