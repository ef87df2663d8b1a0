"""``python -m fxpipe``: the same as the console script ``fxpipe``."""

import sys

from fxpipe.cli.main import main

sys.exit(main())
