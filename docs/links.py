"""Makes links of the public names that pages spell as code: a Sphinx extension.

Guides say `poptorch.OutputMode.All`, `executor.profile(...)` or `deviceIterations`; each leads to
the entry of the reference.
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Iterable
from functools import cached_property
from typing import Any

PACKAGE = "popsim_torch."
_CALLED = re.compile(r"\(.*\)$", re.DOTALL)
_CAMEL_CASE = re.compile(r"[a-z][A-Z]")


class Names:
    """The public names, as pages may spell them.

    Args:
        paths: All of them: ``popsim_torch.Options.deviceIterations``.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        self._paths = set(paths)

    @cached_property
    def _members(self) -> dict[str, str | None]:
        """The path of each method that one class alone has, by its own name."""
        found: dict[str, str | None] = {}
        for path in sorted(self._paths):
            owner, _, name = path.rpartition(".")
            if owner in self._paths and _CAMEL_CASE.search(name):
                found[name] = None if name in found else path
        return found

    def path(self, code: str, *, in_guide: bool) -> str | None:
        """Return the path of what a piece of code names, None if it is no public name.

        Args:
            code: As the page has it: ``poptorch.fit``, ``model.getAnchoredTensor("x")``.
            in_guide: Whether the page is a guide. In docstrings a word in small letters is rather
                an argument than a function.
        """
        called = _CALLED.sub("", code)
        name = called.removeprefix(PACKAGE).removeprefix("poptorch.")
        is_word = name == called and name.islower() and "." not in name
        if is_word and (not in_guide or hasattr(builtins, name)):
            return None
        path = PACKAGE + re.sub(r"^executor\.", "PoplarExecutor.", name)
        if path in self._paths:
            return path
        return self._members.get(name.rpartition(".")[2])


def setup(app: Any) -> dict[str, bool]:
    """Put the links into every page when it is written."""
    import public
    from docutils import nodes

    names = Names(public.names())

    def link(_: Any, page: nodes.document, docname: str) -> None:
        index = app.env.get_domain("py").objects
        for code in list(page.findall(nodes.literal)):
            in_text = isinstance(code.parent, (nodes.paragraph, nodes.term, nodes.strong))
            path = names.path(code.astext(), in_guide=not docname.startswith("api/"))
            if not in_text or "xref" in code["classes"] or path not in index:
                continue
            entry = index[path]
            target = f"{app.builder.get_relative_uri(docname, entry.docname)}#{entry.node_id}"
            reference = nodes.reference("", "", internal=True, refuri=target, reftitle=path)
            code.replace_self(reference)
            reference += code

    app.connect("doctree-resolved", link)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
