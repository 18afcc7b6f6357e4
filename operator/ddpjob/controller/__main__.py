"""`python -m ddpjob.controller`: the operator."""

import sys

try:
    from ddpjob.controller.main import main
except ModuleNotFoundError as error:
    if not error.name or error.name.startswith("ddpjob"):
        raise
    print(f"ddpjob.controller needs the package {error.name}: pip install 'ddpjob[operator]'", file=sys.stderr)
    sys.exit(2)

sys.exit(main())
