"""`python -m ddpjob.cli`: the same as `ddpjob`."""

import sys

from ddpjob.missing_package import missing_package


def main() -> int:
    """Run the command; return the exit code."""
    try:
        from ddpjob.cli.main import main as command

        return command()
    except KeyboardInterrupt:  # Ctrl-C during the import.
        return 130
    except ModuleNotFoundError as error:
        # This may happen late, because some packages are imported only when they are used.
        print(missing_package(error, "ddpjob", "cli"), file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
