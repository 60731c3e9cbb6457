"""``python -m pearl.cli`` is ``pearl``."""

import sys

from pearl.cli import main

sys.exit(main())
