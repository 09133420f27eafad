"""mkdocs hook: pages link to files of the tree outside docs/, and the site gets a copy of each.

Pictures of the page (scripts/page_pictures.py) are in the site where they have been made.

A link to ../examples/chat.yaml is right in the tree; in the site it leads to
files/examples/chat.yaml.  A Markdown file, as of bench/results, is a page there.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[1]
FOLDER = "files/"
PICTURES = ROOT / ".venv-docs/pictures"
_MARK = "<!-- pictures of the page: scripts/docs_site.py -->"
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|[#/])[^)\s#]+")


def on_files(files: Files, config: Any) -> Files:
    """Add every file outside docs/ that a page links to, and the files that those link to."""
    for path in sorted(PICTURES.glob("*.png")):
        files.append(File.generated(config, f"pictures/{path.name}", abs_src_path=str(path)))
    pages = [file for file in files if file.is_documentation_page()]
    while pages:
        page = pages.pop()
        for link in set(_LINK.findall(page.content_string)):
            place = _in_site(page.src_uri, link)
            source = ROOT / place.removeprefix(FOLDER)
            if not place.startswith(FOLDER) or place in files.src_uris or not source.is_file():
                continue
            added = File.generated(
                config, place, abs_src_path=str(source), inclusion=InclusionLevel.NOT_IN_NAV
            )
            files.append(added)
            if added.is_documentation_page():
                pages.append(added)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Put the pictures of the page in, and lead every link to where its target is in the site."""
    names = [path.stem for path in sorted(PICTURES.glob("*.png"))]
    images = "\n\n".join(f"![{name.replace('-', ', ')}](pictures/{name}.png)" for name in names)
    markdown = markdown.replace(_MARK, images)
    page_uri = page.file.src_uri
    folder = posixpath.dirname(page_uri) or "."
    return _LINK.sub(
        lambda link: posixpath.relpath(_in_site(page_uri, link.group()), folder), markdown
    )


def _in_site(page_uri: str, link: str) -> str:
    """Path in the site of a link's target.  page_uri: in the site, of the page with the link"""
    is_copy = page_uri.startswith(FOLDER)
    in_tree = page_uri.removeprefix(FOLDER) if is_copy else f"docs/{page_uri}"
    target = posixpath.normpath(posixpath.join(posixpath.dirname(in_tree), link))
    return target.removeprefix("docs/") if target.startswith("docs/") else FOLDER + target
