"""Compiles a plan's program for a machine that is not there, and reads what the compiler made of it.

`program` exports, `build` compiles in a process of its own (`child`) and keeps results on disk, `hlo` reads scheduled
programs, `audit` compares them with the plan.
"""

from autoshard.sharding.audit.aot_compile import Compiled, build, missing_compiler
from autoshard.sharding.audit.export import CompileJob, export_plan
from autoshard.sharding.audit.verification import Audit, AuditError, verify

__all__ = ["Audit", "AuditError", "Compiled", "CompileJob", "build", "export_plan", "missing_compiler", "verify"]
