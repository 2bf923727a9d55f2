"""The names of all tests, for documents that cite them."""

import ast
from pathlib import Path

TESTS = {
    node.name
    for path in Path(__file__).parents[1].rglob("test_*.py")
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.FunctionDef)
}
