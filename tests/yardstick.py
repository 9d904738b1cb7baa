"""Count what makes Python code easy or hard to skim: `python tests/yardstick.py whet tests`.

Tokens measure how much code there is, whatever its line breaks; tokens per code line measure how dense it is.
"""

import ast
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
DENSE = 24  # tokens on one code line from which it has to be solved rather than read


@dataclass
class Count:
    """What was counted in one file, or in several together."""

    files: int = 0
    lines: int = 0
    tokens: int = 0
    code_lines: int = 0
    dense_lines: int = 0
    comments: int = 0  # lines that hold nothing else
    comprehensions: int = 0
    nested_comprehensions: int = 0
    walrus_in_comprehension: int = 0
    classes: int = 0
    imports_in_functions: int = 0
    format_skips: int = 0
    longest_file: int = 0
    longest_function: int = 0

    def add(self, other: "Count") -> None:
        for name, value in vars(other).items():
            mine = getattr(self, name)
            combined = max(mine, value) if name.startswith("longest") else mine + value
            setattr(self, name, combined)

    @property
    def tokens_per_line(self) -> float:
        return self.tokens / self.code_lines

    def per_hundred(self, count: int) -> float:
        return 100 * count / self.code_lines


def inner_nodes(node: ast.AST) -> Iterable[ast.AST]:
    """All nodes below this one."""
    for child in ast.iter_child_nodes(node):
        yield from ast.walk(child)


def count_text(text: str) -> Count:
    """Count one file's text.

    >>> count = count_text("# why\\nx = [a for a in b]  # beside\\n")
    >>> count.tokens, count.code_lines, count.comprehensions, count.comments
    (9, 1, 1, 1)
    """
    count = Count(files=1, lines=text.count("\n"), longest_file=text.count("\n"))
    per_line: Counter[int] = Counter()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            count.comments += token.line.lstrip().startswith("#")
            count.format_skips += "fmt: skip" in token.string
        if token.type not in LAYOUT:
            per_line[token.start[0]] += 1
    count.tokens = per_line.total()
    count.code_lines = len(per_line)
    count.dense_lines = sum(n >= DENSE for n in per_line.values())

    imports = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, COMPREHENSIONS):
            below = list(inner_nodes(node))
            count.comprehensions += 1
            count.nested_comprehensions += any(isinstance(n, COMPREHENSIONS) for n in below)
            count.walrus_in_comprehension += any(isinstance(n, ast.NamedExpr) for n in below)
        elif isinstance(node, ast.ClassDef):
            count.classes += 1
        elif isinstance(node, FUNCTIONS):
            assert node.end_lineno is not None
            count.longest_function = max(count.longest_function, node.end_lineno - node.lineno + 1)
            imports |= {n for n in inner_nodes(node) if isinstance(n, ast.Import | ast.ImportFrom)}
    count.imports_in_functions = len(imports)
    return count


def count_folder(folder: Path) -> Count:
    total = Count()
    for path in sorted(folder.rglob("*.py")):
        total.add(count_text(path.read_text()))
    return total


def main(folders: list[str]) -> None:
    for folder in folders:
        count = count_folder(Path(folder))
        print(
            f"{folder}: {count.tokens / 1000:.1f}k tokens, {count.lines:,} lines, {count.files} files"
        )
        print(f"  {count.tokens_per_line:.2f} tokens per code line")
        print(
            f"  {count.per_hundred(count.dense_lines):.1f}% of the code lines have {DENSE} tokens or more"
        )
        print(
            f"  {count.per_hundred(count.comprehensions):.1f} comprehensions per 100 code lines,"
            f" {count.nested_comprehensions} nested, {count.walrus_in_comprehension} with a walrus"
        )
        print(f"  {count.per_hundred(count.comments):.1f} comment lines per 100 code lines")
        print(
            f"  {count.classes} classes, {count.imports_in_functions} imports in functions,", end=""
        )
        print(f" {count.format_skips} format skips")
        print(f"  longest file {count.longest_file}, longest function {count.longest_function}")


if __name__ == "__main__":
    main(sys.argv[1:] or ["whet", "tests"])
