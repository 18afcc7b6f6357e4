"""`python -m ddpjob.cli`: the same as `ddpjob`."""

import sys

from ddpjob.cli.main import main

sys.exit(main())
