"""``python -m titan_lifecycle`` is the ``titan-lifecycle`` command."""

import sys

from titan_lifecycle.cli import main

sys.exit(main())
