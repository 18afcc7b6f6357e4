"""`python -m testcluster`."""

import sys

from testcluster.cli import main

sys.exit(main())
