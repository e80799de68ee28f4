"""Compiles a plan's program for a machine that is not there, and reads what the compiler made of it.

`program` exports, `build` compiles in a process of its own (`child`) and keeps results on disk, `hlo` reads scheduled
programs, `audit` compares them with the plan.
"""

from autoshard.sharding.aot.audit import Audit, AuditError, verify
from autoshard.sharding.aot.build import Compiled, build, missing_compiler
from autoshard.sharding.aot.program import Job, export_plan

__all__ = ["Audit", "AuditError", "Compiled", "Job", "build", "export_plan", "missing_compiler", "verify"]
