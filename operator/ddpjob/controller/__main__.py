"""Starts the operator: `python -m ddpjob.controller`."""

import sys

from ddpjob.missing_package import missing_package

try:
    from ddpjob.controller.main import main
except ModuleNotFoundError as error:
    print(missing_package(error, "ddpjob.controller", "operator"), file=sys.stderr)
    sys.exit(2)

sys.exit(main())
