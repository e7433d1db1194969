"""`python -m mok_modular.cli` is `mok-modular`."""

import sys

from mok_modular.cli.commands import main

sys.exit(main())
