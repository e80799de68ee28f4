"""Compiles a plan's program for its target, which need not be attached, and compares the result with the plan.

`export` exports the program, `aot_compile` compiles it in a separate process (`compiler_process`) and caches the result
on disk, `verification` compares the compiled program with the plan, `audit` stores and prints the comparison,
`requested_options` reads `Plan.verify(options=...)`.
"""

from autoshard.sharding.audit.aot_compile import Compiled, compile_job, missing_compiler
from autoshard.sharding.audit.audit import Audit, AuditError
from autoshard.sharding.audit.export import CompileJob, export_plan
from autoshard.sharding.audit.verification import verify, verify_under

__all__ = [
    "Audit",
    "AuditError",
    "Compiled",
    "CompileJob",
    "compile_job",
    "export_plan",
    "missing_compiler",
    "verify",
    "verify_under",
]
