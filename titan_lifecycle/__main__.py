"""``python -m titan_lifecycle`` is the ``titan-lifecycle`` command.

It sees the same import paths: ``-m`` puts the current folder before Python's own modules, where a
user's ``profile.py`` would be taken for Python's. The ranks are started without it, too.
"""

import sys

if not sys.flags.safe_path:
    del sys.path[0]

from titan_lifecycle.cli import main

sys.exit(main())
