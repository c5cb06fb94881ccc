# SPDX-License-Identifier: Apache-2.0
"""What mkdocs needs beside its configuration: the README as front page, a page per folder of the package, links in docstrings."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File


ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "gto_hf"


class GroupHeadings(griffe.Extension):
    """TRL's `> Parameters that control ..` headings among the parameters of a configuration are left out: no parser knows them."""

    def on_class(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """Edit the docstring of a class before it is parsed."""
        if cls.docstring is not None:
            cls.docstring.value = re.sub(r"^ *> Parameters that .*\n", "", cls.docstring.value, flags=re.MULTILINE)


def exported(folder: Path) -> list[str]:
    """`__all__` of a package, read without importing it."""
    for node in ast.parse((folder / "__init__.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "__all__":
            return ast.literal_eval(node.value)
    return []


def reference() -> dict[str, list[str]]:
    """Page to the full names on it: the public API first, then what each folder adds to it."""
    public = exported(PACKAGE)
    pages = {"api/gto_hf.md": [f"gto_hf.{name}" for name in public]}
    for folder in sorted(path.parent for path in PACKAGE.glob("*/__init__.py")):
        names = [name for name in exported(folder) if name not in public and (name[0].islower() or not name.isupper())]
        if names:
            pages[f"api/{folder.name}.md"] = [f"gto_hf.{folder.name}.{name}" for name in names]
    return pages


KNOWN = {full.rpartition(".")[2]: full for names in reversed(reference().values()) for full in names}


def front_page() -> str:
    """The README with links that work from here; what is not among these pages is left as text."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"\]\(docs/([\w.-]+\.md)", r"](\1", text)
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}

    def keep(match: re.Match) -> str:
        label, address = match.groups()
        outside = not address.startswith(("http", "#")) and address.partition("#")[0] not in pages
        return label if outside else match[0]

    return re.sub(r"\[([^\]]+)\]\(([^)]+)\)", keep, text)


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages."""
    files.append(File.generated(config, "index.md", content=front_page()))
    for page, names in reference().items():
        title = page.removeprefix("api/").removesuffix(".md")
        module = PACKAGE / ("" if title == "gto_hf" else title) / "__init__.py"
        about = ast.get_docstring(ast.parse(module.read_text(encoding="utf-8")))
        blocks = "\n\n".join(f"::: {name}" for name in names)
        files.append(File.generated(config, page, content=f"# {title}\n\n{about}\n\n{blocks}\n"))
    return files


def on_page_content(html: str, **kwargs: Any) -> str:
    """[`Name`] in a docstring, as transformers writes it, becomes a link if there is a page for it."""

    def link(match: re.Match) -> str:
        name = match[1].removeprefix("~").rpartition(".")[2]
        code = f"<code>{name}</code>"
        return f'<autoref identifier="{KNOWN[name]}">{code}</autoref>' if name in KNOWN else code

    def plain(match: re.Match) -> str:
        """A type such as `str` or [`DraftModel`], *optional*, which is shown as code already."""
        return f"<code>{re.sub(r'[`*~]', '', match[1])}</code>"

    html = re.sub(r"<code>([^<\n]*`[^<\n]*)</code>", plain, html)
    return re.sub(r"\[<code>(~?[\w.]+)</code>\]", link, html)
