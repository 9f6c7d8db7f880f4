"""The directive `command-help`: what a sub-command of torchrec-bls prints for --help."""

import io
import os
from contextlib import redirect_stdout, suppress

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from torchrec_bls.cli.main import run


class CommandHelp(SphinxDirective):
    """Takes the sub-command as its argument."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Returns the help as a literal block."""
        self.env.note_reread()
        os.environ["COLUMNS"] = "90"
        printed = io.StringIO()
        with redirect_stdout(printed), suppress(SystemExit):
            run([self.arguments[0], "--help"])
        return [nodes.literal_block(printed.getvalue(), printed.getvalue(), language="none")]


def setup(app: Sphinx) -> dict[str, bool]:
    """Adds the directive."""
    app.add_directive("command-help", CommandHelp)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
