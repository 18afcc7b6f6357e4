"""`python -m ddpjob.controller`: the operator."""

import sys

from ddpjob.controller.main import main

sys.exit(main())
