"""``python -m pearl.cli`` is ``pearl``."""

import sys

from pearl.__main__ import main

sys.exit(main())
