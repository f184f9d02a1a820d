"""Settings of Sphinx, which makes the site. `make docs` runs it, with every warning an error.

The pages are the Markdown that the repository shows too. The API reference is made from docstrings, and the tables of
the benchmark page from the files in benchmarks/results.
"""

import inspect
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER))

import benchmarks_page  # noqa: E402
from sphinx.errors import ExtensionError  # noqa: E402

import jax_dma  # noqa: E402

project, author = "jax_dma", "The jax_dma authors"
version = release = jax_dma.__version__
copyright = f"{author}, BSD 3-Clause"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["README.md", "generated"]  # index.md includes the first, benchmarks.md what is in the second
myst_heading_anchors = 4  # the anchors that a repository page has

autoclass_content = "both"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints = "none"  # shapes and dtypes are in the text
napoleon_use_param = False  # "q, k, v: ..." stays together
napoleon_custom_sections = [("Attributes", "params_style")]
nitpicky = True  # a name that docstrings refer to exists in the reference, or belongs to another library
nitpick_ignore_regex = [("py:.*", r"(jax|flax|functools)\..*"), ("py:mod", "jax_dma.kept_keys"), ("py:exc", ".*")]

html_theme = "sphinx_book_theme"
html_title = "jax_dma"
html_theme_options = {"show_toc_level": 2, "navigation_with_keys": False, "navbar_persistent": []}
html_copy_source = html_show_sourcelink = False

OF_REPOSITORY = {  # pages of the repository that are not in docs/, and those that include them
    "../CHANGELOG.md": "changelog.md",
    "../CONTRIBUTING.md": "contributing.md",
    "../benchmarks/README.md": "measuring.md",
}


class Default:
    """A default value as a signature shows it."""

    def __init__(self, value):
        self.value = value

    def __repr__(self):
        if isinstance(self.value, type):
            return self.value.__name__
        return "..." if callable(self.value) else repr(self.value)


def signature_of_module(app, what, name, obj, options, signature, returns):
    """nnx.Module hides the arguments of __init__."""
    if what != "class" or signature != "(*args, **kwargs)":
        return None
    _, *arguments = inspect.signature(obj.__init__).parameters.values()
    shown = [x if x.default is x.empty else x.replace(default=Default(x.default)) for x in arguments]
    return str(inspect.Signature(shown)), returns


def follow_links(app, name, source):
    for outside, page in OF_REPOSITORY.items():
        source[0] = source[0].replace(f"]({outside}", f"]({page}")


def check_reference():
    """Every public name is on the page of the reference."""
    text = (FOLDER / "reference.md").read_text()
    modules = ("context", "masks")
    names = [f"jax_dma.{name}" for name in jax_dma.__all__ if name not in modules]
    missing = [name for name in names if f":: {name}\n" not in text]
    if missing:
        raise ExtensionError(f"docs/reference.md does not list {', '.join(missing)}")


def setup(app):
    check_reference()
    app.connect("autodoc-process-signature", signature_of_module)
    app.connect("source-read", follow_links)
    app.connect("builder-inited", lambda app: benchmarks_page.write(FOLDER.parent / "benchmarks", FOLDER / "generated"))
