"""What the site needs beyond Markdown; MkDocs calls these functions by their names while it builds.

Marks behind the language of a code block are for the tests (tests/test_docs.py). Formulas become MathML, which browsers
draw by themselves. A link to a file outside docs/ becomes its path, since the site does not hold it. The tables of
commands and settings come from the program. A site that would load anything from a network is refused.
"""

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LOADS = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "link": "href",
}  # tag -> what it fetches
HARMLESS = {"canonical", "next", "prev", "alternate"}  # of <link>: says where, fetches nothing


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Markdown that GitHub shows well becomes Markdown that the site shows well."""
    markdown = re.sub(
        r"^```math\n(.*?)^```$", lambda found: formula(found[1]), markdown, flags=re.M | re.S
    )
    markdown = re.sub(r"^(```[a-z]+) [a-z ]+$", r"\1", markdown, flags=re.M)
    markdown = re.sub(
        r"\[([\w-]+)\.md\]\(", r"[\1](", markdown
    )  # on the site, a page has no file name
    folder = (ROOT / "docs" / page.file.src_uri).parent
    markdown = re.sub(
        r"(?<!!)\[([^\]]+)\]\((\.\.[^)#\s]*)(#[^)]*)?\)",
        lambda found: inside(found, folder),
        markdown,
    )
    if "<!-- settings -->" in markdown:
        markdown = markdown.replace("<!-- settings -->", settings_tables())
    if "<!-- commands -->" in markdown:
        markdown = markdown.replace("<!-- commands -->", command_texts())
    return markdown


def formula(tex: str) -> str:
    from latex2mathml.converter import convert

    return f'<div class="formula">{convert(tex.strip(), display="block")}</div>\n'


def inside(link: re.Match[str], folder: Path) -> str:
    """The link as it is, or the path of a file that the site does not hold."""
    target = (folder / link[2]).resolve()
    if target.is_relative_to(ROOT / "docs"):
        return link[0]
    name = f"`{target.relative_to(ROOT)}`"
    return name if link[1].strip("`") in name else f"{link[1]}: {name}"


def settings_tables() -> str:
    from whet.config import EVERYDAY
    from whet.recipe import describe

    sections: dict[str, list[str]] = {}
    for name, default, meaning in describe():
        section, _, _ = name.rpartition(".")
        everyday = "●" if name in EVERYDAY else ""
        cells = (f"`{name}`", f"`{default}`", everyday, " ".join(meaning.split()))
        row = " | ".join(cell.replace("|", "\\|") for cell in cells)
        sections.setdefault(section or "The top of a recipe", []).append(f"| {row} |")
    head = "| setting | default | everyday | meaning |\n|---|---|:-:|---|\n"
    return "\n\n".join(f"## {name}\n\n{head}" + "\n".join(rows) for name, rows in sections.items())


def command_texts() -> str:
    import typer

    from whet.cli import app

    texts: list[str] = []

    def add(command: Any, path: str) -> None:
        for name, child in getattr(command, "commands", {}).items():
            add(child, f"{path} {name}")
        if not hasattr(command, "commands"):
            context = command.make_context(path, [], resilient_parsing=True, max_content_width=100)
            texts.append(f"## {path}\n\n```text\n{command.get_help(context).strip()}\n```")

    add(typer.main.get_command(app), "whet")
    return "\n\n".join(texts)


class Loaded(HTMLParser):
    """Addresses that a browser fetches by itself to show the page, where they are not of the site."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        address = values.get(LOADS.get(tag, "")) or ""
        if re.match(r"(https?:)?//", address) and values.get("rel") not in HARMLESS:
            self.found.append(address)
        self.found += re.findall(
            r"url\(\s*['\"]?((?:https?:)?//[^)'\"]*)", values.get("style") or ""
        )


def foreign(site: Path) -> list[str]:
    """Every address outside the site that one of its pages or style sheets loads, with the file's name."""
    found = []
    for page in sorted(site.rglob("*.html")):
        loaded = Loaded()
        loaded.feed(page.read_text(encoding="utf-8"))
        found += [f"{page.relative_to(site)}: {address}" for address in loaded.found]
    for sheet in sorted([*site.rglob("*.css"), *site.rglob("*.svg")]):
        text = sheet.read_text(encoding="utf-8")
        addresses = re.findall(r"(?:url\(|@import\s+)['\"]?((?:https?:)?//[^)'\"\s]*)", text)
        found += [f"{sheet.relative_to(site)}: {address}" for address in addresses]
    return found


def on_post_build(config: Any, **_: Any) -> None:
    if found := foreign(Path(config["site_dir"])):
        raise SystemExit("The site would load from a network: " + "; ".join(found))
