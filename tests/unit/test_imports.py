"""No group of files imports each other, directly or through others. Imports in functions count like all others."""

from __future__ import annotations

import graphlib

import grimp


def test_no_files_import_each_other_in_a_circle() -> None:
    graph = grimp.build_graph("asyncrl", "benchmarks", cache_dir=None)
    imported = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    graphlib.TopologicalSorter(imported).prepare()  # raises CycleError, which names the circle
