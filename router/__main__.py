"""`python -m router` is `kv-router`."""

import sys

from router.cli import main

sys.exit(main())
