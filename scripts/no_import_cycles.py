"""A contract for import-linter: no module imports itself through others, `__init__` of packages included.

The built-in contract `acyclic_siblings` compares siblings only. It does not see a module that imports the package it
stands in.
"""

from graphlib import CycleError, TopologicalSorter

import grimp
from importlinter import Contract, ContractCheck, fields, output


class NoImportCycles(Contract):
    """The import graph of the root packages has no cycle.

    The option `scripts_folder` is for scripts that import each other by bare names: with `benchmarks`, an import of
    `estimate` means `benchmarks.estimate`.
    """

    type_name = "no_import_cycles"
    scripts_folder = fields.StringField(required=False)

    def check(self, graph: grimp.ImportGraph, verbose: bool) -> ContractCheck:
        """Whether the modules can be sorted by their imports."""
        folder = f"{self.scripts_folder}." if self.scripts_folder else ""

        def resolved(name: str) -> str:
            return folder + name if folder and folder + name in graph.modules else name

        imports = {
            module: {resolved(name) for name in graph.find_modules_directly_imported_by(module)}
            for module in graph.modules
            if not graph.is_module_squashed(module)
        }
        try:
            TopologicalSorter(imports).prepare()
        except CycleError as error:
            return ContractCheck(kept=False, metadata={"cycle": error.args[1]})
        return ContractCheck(kept=True)

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Prints the cycle, each module followed by one that imports it."""
        output.print_error("These modules import each other in a cycle:")
        for module in check.metadata["cycle"]:
            output.print_error(f"  {module}")
