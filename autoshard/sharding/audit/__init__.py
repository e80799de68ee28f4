"""Compiles a plan's program for a machine that is not there, and reads what the compiler made of it.

`export` exports, `aot_compile` compiles in a process of its own (`compiler_process`) and keeps results on disk,
`verification` compares what was compiled with the plan, `audit` holds and prints the result.
"""

from autoshard.sharding.audit.aot_compile import Compiled, build, missing_compiler
from autoshard.sharding.audit.audit import Audit, AuditError
from autoshard.sharding.audit.export import CompileJob, export_plan
from autoshard.sharding.audit.verification import verify

__all__ = ["Audit", "AuditError", "Compiled", "CompileJob", "build", "export_plan", "missing_compiler", "verify"]
